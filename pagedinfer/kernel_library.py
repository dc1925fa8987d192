"""Loads `_kernels.so` into torch, and knows what it was built with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MIN_TORCH = (2, 11)
"""The torch whose stable C++ ABI the kernels use; every later one loads them too."""

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What the kernels of this installation were built with; written by the build."""

    torch: str
    """The torch whose headers were used, such as "2.13.0+cpu"."""
    cuda: str | None
    """The CUDA toolkit, such as "13.0.88"; None: there are CPU kernels only."""
    cuda_archs: tuple[str, ...]
    """What is compiled for GPUs, such as ("80-real", "90a-real", "90-virtual"); "virtual" is PTX."""
    compiler: str
    """The C++ compiler, such as "GNU 12.2.0"."""

    @property
    def has_hopper_code(self) -> bool:
        """Whether something is compiled for compute capability 9.0 or a later one."""
        numbers = (re.match(r"\d+", arch) for arch in self.cuda_archs)
        return any(number is not None and int(number[0]) >= 90 for number in numbers)

    @property
    def has_wgmma_code(self) -> bool:
        """Whether the kernels through wgmma are compiled: for compute capability 9.0 itself, never as PTX."""
        return any(arch.startswith("90a") for arch in self.cuda_archs)


def build_info() -> BuildInfo | None:
    """What the kernels were built with; None if the build left no record (there was none, then)."""
    try:
        record = json.loads((_PACKAGE / "_build_info.json").read_text())
    except OSError:
        return None
    return BuildInfo(
        torch=record["torch"],
        cuda=record["cuda"],
        cuda_archs=tuple(record["cuda_archs"]),
        compiler=record["compiler"],
    )


def load_kernels() -> Any:
    """Registers the ops with torch; returns their namespace, `torch.ops.pagedinfer`.

    Raises:
        ImportError: the library is missing, or the installed torch cannot load it; one line with the torch
            that it was built for and the torch that is here.
    """
    library = _PACKAGE / "_kernels.so"
    problem = _load_problem(torch.__version__, build_info(), library.exists())
    if problem is not None:
        raise ImportError(problem)
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        # torch says only that it failed; why stands in the loader's own error behind it.
        reason = str(error.__cause__ or error)
        raise ImportError(_cannot_load(torch.__version__, build_info(), reason)) from error
    return torch.ops.pagedinfer


def _load_problem(torch_version: str, info: BuildInfo | None, library_exists: bool) -> str | None:
    """Why loading cannot work, known before trying; None if nothing speaks against it."""
    if not library_exists:
        return (
            f"pagedinfer's kernels are not built: there is no {_PACKAGE / '_kernels.so'}; "
            "run `make build` or `pip install -e .` in its source tree"
        )
    release = re.match(r"(\d+)\.(\d+)", torch_version)
    if release is not None and (int(release[1]), int(release[2])) < MIN_TORCH:
        return _cannot_load(torch_version, info, "the installed torch is too old")
    return None


def _cannot_load(torch_version: str, info: BuildInfo | None, reason: str) -> str:
    built_for = f"built with torch {info.torch}" if info else "built with an unknown torch"
    first_line = reason.splitlines()[0] if reason else "unknown reason"
    return (
        f"pagedinfer's kernels ({built_for}, for torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}) cannot be loaded "
        f"under torch {torch_version}: {first_line}; install a torch that fits, or build pagedinfer again"
    )
