"""What GPUs have: memory, bandwidth and arithmetic, as their makers say."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

GIB = 1 << 30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    name: str
    memory: int  # bytes, as torch reports them
    bandwidth: float | None  # bytes/s
    flops: float | None  # 16-bit, dense, a second


_KNOWN = (
    ("B200", 178.4, 8.0, 2250),
    ("H200", 139.8, 4.8, 989),
    ("H100-80GB", 79.1, 3.35, 989),
    ("H100-PCIE", 79.1, 2.04, 756),
    ("A100-80GB", 79.1, 2.04, 312),
    ("A100-40GB", 39.4, 1.56, 312),
    ("L40S", 44.4, 0.86, 362),
    ("L4", 22.0, 0.30, 121),
    ("A10", 22.1, 0.60, 125),
    ("T4", 14.6, 0.32, 65),
    ("RTX-5090", 31.4, 1.79, 209),
    ("RTX-4090", 23.5, 1.01, 165),
    ("RTX-3090", 23.6, 0.94, 71),
)
"""(name, GiB, TB/s, TFLOP/s)"""


def known_gpus() -> list[str]:
    """Names that `find_gpu` takes, apart from sizes."""
    return [name for name, *_ in _KNOWN]


def find_gpu(text: str) -> Gpu:
    """A GPU by name ("H200", "A100-80GB") or by the size of its memory alone ("24GiB", "80GB").

    Raises:
        ValueError: neither.
    """
    wanted = text.strip().upper().replace("_", "-").replace(" ", "-")
    for name, memory, bandwidth, teraflops in _KNOWN:
        if wanted in (name, name.replace("-", ""), f"NVIDIA-{name}"):
            return Gpu(name, int(memory * GIB), bandwidth * 1e12, teraflops * 1e12)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is not None and match[2]:
        return Gpu(text.strip(), int(float(match[1]) * _UNITS[match[2]]), None, None)
    nearest = difflib.get_close_matches(wanted, known_gpus(), n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ValueError(
        f"--gpu takes a size such as 24GiB or one of {', '.join(known_gpus())}; got {text!r}{hint}"
    )
