"""Which GPUs the CUDA kernels are compiled for, in CMake's spelling: "80-real" is code, "90-virtual" PTX."""

from __future__ import annotations

import os
import re
import subprocess

from kernel_build.errors import BuildError, say
from kernel_build.toolchain import Nvcc

# sm_90a has what Hopper's tensor cores need, but its PTX does not run on later GPUs; plain compute_90 does.
DEFAULT_ARCHS = ("80-real", "90a-real", "90-virtual")
MIN_CAPABILITY = (8, 0)


def cuda_archs(nvcc: Nvcc) -> tuple[str, ...]:
    """`PAGEDINFER_CUDA_ARCHS`, else those of the GPUs of this machine, else DEFAULT_ARCHS."""
    wish = os.environ.get("PAGEDINFER_CUDA_ARCHS")
    if wish:
        return parse_archs(wish)
    present = tuple(dict.fromkeys(arch_of(gpu, supported_archs(nvcc)) for gpu in present_gpus()))
    return present or DEFAULT_ARCHS


def parse_archs(text: str) -> tuple[str, ...]:
    """CMake's spelling of a list such as "80;90a", "8.0 9.0a", "sm_90a" or "90-virtual" (PTX), "9.0+PTX".

    Raises:
        BuildError: an item that is not an architecture, or one older than sm_80.
    """
    archs = []
    for item in filter(None, re.split(r"[;,\s]+", text)):
        found = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(-real|-virtual|\+PTX)?", item)
        if found is None:
            raise BuildError(
                f"PAGEDINFER_CUDA_ARCHS: {item!r} is not an architecture; "
                "right would be 80, 90a, 9.0 or 90-virtual (PTX)"
            )
        major, minor, variant, suffix = found.groups()
        if (int(major), int(minor)) < MIN_CAPABILITY:
            raise BuildError(f"PAGEDINFER_CUDA_ARCHS: {item} is too old; the kernels need sm_80 or newer")
        name = f"{major}{minor}{variant}"
        if suffix != "-virtual":
            archs.append(f"{name}-real")
        if suffix in ("-virtual", "+PTX"):
            archs.append(f"{name}-virtual")
    if not archs:
        raise BuildError(f"PAGEDINFER_CUDA_ARCHS={text!r} names no architecture")
    return tuple(dict.fromkeys(archs))


def present_gpus() -> list[tuple[int, int]]:
    """Compute capabilities of this machine's GPUs that the kernels can serve, as nvidia-smi tells them."""
    try:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [
        (int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)\s*$", output, re.MULTILINE)
    ]
    for gpu in gpus:
        if gpu < MIN_CAPABILITY:
            say(f"*** this machine's sm_{gpu[0]}{gpu[1]} GPU is too old: the kernels need sm_80 or newer ***")
    return [gpu for gpu in gpus if gpu >= MIN_CAPABILITY]


def supported_archs(nvcc: Nvcc) -> set[str]:
    """What this nvcc can compile for, such as {"80", "90", "90a"}."""
    output = subprocess.run(
        [nvcc.path, "--list-gpu-code"], capture_output=True, text=True, check=False
    ).stdout
    return set(re.findall(r"sm_(\w+)", output))


def arch_of(capability: tuple[int, int], supported: set[str]) -> str:
    """The architecture to compile for one GPU: its own; PTX if it is newer than nvcc."""
    number = f"{capability[0]}{capability[1]}"
    if capability == (9, 0):
        return "90a-real"
    return f"{number}-real" if number in supported else "90-virtual"
