"""Finds the installed torch without importing it.

pip builds in an isolated environment in which `import torch` fails, but the interpreter's `sysconfig` still
names the folders of the environment that is being installed into. Those are searched, in the order in which
the interpreter itself would look.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_build.errors import BuildError

MIN_TORCH = (2, 11)
"""The torch whose stable C++ ABI the kernels are written against (TORCH_TARGET_VERSION in CMakeLists.txt)."""

_WANTED = f"torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}"


@dataclass(frozen=True)
class TorchInstall:
    """One torch on this machine."""

    directory: Path
    """The package's folder: holds include/ and lib/."""
    version: str
    """As in torch.__version__, such as "2.13.0+cpu"."""
    kind: str
    """"CPU", "CUDA 13.0" or "ROCm 7.0": what this torch was built for."""
    found_in: str
    """Which of the places searched this is, for the user."""

    def __str__(self) -> str:
        return f"torch {self.version} ({self.kind}) from {self.found_in}: {self.directory}"


def find_torch() -> TorchInstall:
    """The torch to build against: `PAGEDINFER_TORCH_DIR`, else the one that this environment would import.

    Raises:
        BuildError: there is none, it is older than MIN_TORCH, or its headers are missing.
    """
    named = os.environ.get("PAGEDINFER_TORCH_DIR")
    if named:
        torch = read_torch(Path(named), "PAGEDINFER_TORCH_DIR")
        if torch is None:
            raise BuildError(
                f"PAGEDINFER_TORCH_DIR={named} is not a torch package: it must be the folder that holds "
                "torch's version.py, include/ and lib/"
            )
    else:
        torch = _first_torch()
    _check(torch)
    return torch


def read_torch(directory: Path, found_in: str) -> TorchInstall | None:
    """What the torch in this folder says of itself; None if there is none."""
    try:
        text = (directory / "version.py").read_text()
    except OSError:
        return None
    version = _assigned(text, "__version__")
    if version is None:
        return None
    cuda, hip = _assigned(text, "cuda"), _assigned(text, "hip")
    kind = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return TorchInstall(directory.resolve(), version, kind, found_in)


def torch_release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "2.13.0+cpu" or "2.12.0a0+git1234"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise BuildError(f"cannot read torch's version {version!r}")
    return int(numbers[1]), int(numbers[2])


def _first_torch() -> TorchInstall:
    searched = []
    for found_in, directory in site_directories():
        torch = read_torch(directory / "torch", found_in)
        if torch is not None:
            return torch
        searched.append(str(directory))
    raise BuildError(
        f"no torch found, and pagedinfer needs {_WANTED}: install it first (pip install torch) or name its "
        f"folder in PAGEDINFER_TORCH_DIR. Searched: {', '.join(searched)}"
    )


def _check(torch: TorchInstall) -> None:
    if torch_release(torch.version) < MIN_TORCH:
        raise BuildError(
            f"torch {torch.version} is too old: pagedinfer needs {_WANTED} (found in {torch.directory})"
        )
    if not (torch.directory / "include/torch/csrc/stable/library.h").exists():
        raise BuildError(f"torch {torch.version} in {torch.directory} has no headers under include/")


def site_directories() -> Iterator[tuple[str, Path]]:
    """The folders of installed packages, in the interpreter's own order, each with a name for the user."""
    seen: set[Path] = set()
    for name, directory in _all_site_directories():
        path = Path(directory)
        if path not in seen and path.is_dir():
            seen.add(path)
            yield name, path


def _all_site_directories() -> Iterator[tuple[str, str]]:
    paths = sysconfig.get_paths()
    own = [paths["purelib"], paths["platlib"], *site.getsitepackages([sys.prefix, sys.exec_prefix])]
    in_venv = sys.prefix != sys.base_prefix
    if in_venv:
        for directory in own:
            yield "this environment", directory
        if not _inherits_system_packages():
            yield from _importable()
            return
        yield "the user's site-packages", site.getusersitepackages()
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        paths = sysconfig.get_paths(vars=base)
        inherited = site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])
        for directory in (paths["purelib"], paths["platlib"], *inherited):
            yield "the base environment", directory
    else:
        # pip's isolated build turns the user's folder off (PYTHONNOUSERSITE), so that ENABLE_USER_SITE
        # cannot tell whether the interpreter normally has it.
        yield "the user's site-packages", site.getusersitepackages()
        for directory in own:
            yield "this environment", directory
    yield from _importable()


def _importable() -> Iterator[tuple[str, str]]:
    """Where `import torch` would take it from, if from elsewhere still (PYTHONPATH, a .pth file)."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        yield "the import path", str(Path(spec.origin).parent.parent)


def _inherits_system_packages() -> bool:
    """Whether this virtual environment was made with --system-site-packages."""
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text()
    except OSError:
        return False
    setting = re.search(r"^include-system-site-packages\s*=\s*(\w+)", text, re.MULTILINE | re.IGNORECASE)
    return setting is not None and setting[1].lower() == "true"


def _assigned(text: str, name: str) -> str | None:
    """The string that a line `name = '...'` or `name: type = '...'` of a Python file assigns."""
    found = re.search(rf"^{name}\s*(?::[^=]*)?=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return found[1] if found else None
