"""Prints what each CUDA kernel of the latest build takes: registers, shared memory, stack, spills.

    python scripts/kernel_resources.py [part of a kernel's name]

Reads what ptxas said when the objects were compiled (scripts/keep_ptxas_report.sh keeps it beside them).
Shared memory is the static part; what a launch asks for on top is not known to the compiler. Fails if a
kernel spills registers that may not: on the architectures of TUNED none may but those of MAY_SPILL.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

TUNED = ("sm_80", "sm_90a")
"""Architectures for which the kernels have been fitted into their registers: those of a default build."""

MAY_SPILL = {
    ("sm_80", r"attention::decode_kernel<\w+, 128, true>"): 4,
    ("sm_80", r"attention::prefill_mma_kernel<\w+, 128, true>"): 8,
    ("sm_80", r"rotary_store_kv_kernel<__nv_bfloat16, 8, 1, 2, false, false, false>"): 8,
    ("sm_80", r"top_logprobs_kernel<sampling::\w+, false>"): 4,
}
"""Bytes stored per thread, at most, by architecture and a pattern of the kernel's name, as nvcc 13.0 has it.
Each of these keeps one or two numbers for later; on sm_90a the same kernels spill nothing."""


@dataclass
class Kernel:
    """One kernel compiled for one architecture."""

    name: str
    """As in the source, with its template arguments."""
    arch: str
    """Such as "sm_90a"."""
    registers: int = 0
    """Per thread."""
    shared: int = 0
    """Bytes of static shared memory per block."""
    stack: int = 0
    """Bytes of local memory per thread."""
    spill_stores: int = 0
    """Bytes per thread."""
    spill_loads: int = 0


def parse_report(text: str) -> list[Kernel]:
    """The kernels of one `ptxas -v` report, names still mangled. Device functions are not listed."""
    kernels: list[Kernel] = []
    current = None
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernels.append(Kernel(entry[1], entry[2]))
        elif properties := re.search(r"Function properties for (\S+)", line):
            current = kernels[-1] if kernels and kernels[-1].name == properties[1] else None
        elif current is None:
            continue
        elif stack := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            current.stack, current.spill_stores, current.spill_loads = map(int, stack.groups())
        elif used := re.search(r"Used (\d+) registers", line):
            current.registers = int(used[1])
            shared = re.search(r"(\d+) bytes smem", line)
            current.shared = int(shared[1]) if shared else 0
    return kernels


def spills_too_much(kernel: Kernel, name: str) -> bool:
    """Whether a kernel of that name, as in the source, stores more of its registers than it may."""
    listed = [
        most for (arch, names), most in MAY_SPILL.items() if kernel.arch == arch and re.fullmatch(names, name)
    ]
    return kernel.arch in TUNED and kernel.spill_stores > max(listed, default=0)


def reports_of_latest_build() -> list[Path]:
    """The report of every CUDA file that it compiled."""
    folder = Path(__file__).resolve().parent.parent / "build" / "latest"
    return sorted(folder.resolve().rglob("*.cu.o.ptxas"))


def kernels_of(report: Path) -> Iterator[tuple[Kernel, str]]:
    """The kernels of one report, with their readable names."""
    kernels = parse_report(report.read_text())
    return zip(kernels, readable([kernel.name for kernel in kernels]), strict=True)


def readable(names: list[str]) -> list[str]:
    """Names as in the source: demangled, without return type, parameters and our namespaces."""
    if not shutil.which("c++filt"):
        return names
    # -p leaves the parameter list out.
    output = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    shown = []
    for name in output.splitlines():
        name = re.sub(r"pagedinfer::|\(anonymous namespace\)::|_GLOBAL__N__\w+::", "", name)
        name = re.sub(r"\((?:int|unsigned int|bool|long)\)", "", name)
        shown.append(name.removeprefix("void "))
    return shown


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell; the first one to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0], cells[1] = row[0].ljust(widths[0]), row[1].ljust(widths[1])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def main() -> int:
    """Prints the table; returns the exit status."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    reports = reports_of_latest_build()
    if not reports:
        print("no report: the latest build compiled no CUDA kernel (no nvcc?)", file=sys.stderr)
        return 1
    rows = [("kernel", "arch", "registers", "shared", "stack", "spill stores", "spill loads")]
    spilling, too_much = 0, []
    for kernel, name in chain.from_iterable(map(kernels_of, reports)):
        if wanted not in name:
            continue
        numbers = (kernel.registers, kernel.shared, kernel.stack, kernel.spill_stores, kernel.spill_loads)
        rows.append((name, kernel.arch, *map(str, numbers)))
        spilling += kernel.spill_stores > 0
        if spills_too_much(kernel, name):
            too_much.append(f"{name} ({kernel.arch})")
    print(table(rows))
    print(f"{len(rows) - 1} kernels, {spilling} of them spill; shared, stack and spills in bytes")
    if too_much:
        print("spill more than MAY_SPILL lets them: " + "; ".join(too_much), file=sys.stderr)
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
