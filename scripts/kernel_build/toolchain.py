"""Finds what compiles: CMake, ninja, g++, Python.h, pybind11, nvcc; and how many jobs the machine bears."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from kernel_build.errors import BuildError

MIN_CMAKE = (3, 27)
"""CMake 3.25.1 (Debian 12) does not know nvcc's C++20 flag and stops with 'dialect "CUDA20"'."""
MIN_NVCC = (12, 0)
"""The first nvcc with C++20 and with sm_90a."""
MEMORY_PER_JOB = 2 << 30
"""Bytes that one compiler may take: the largest .cu files need about this."""

INSTALL_REQUIREMENTS = (
    "pip install 'setuptools>=77' wheel 'pybind11>=3.0' ninja 'cmake>=3.27', "
    "or leave out --no-build-isolation"
)
"""What to do when a build requirement of pyproject.toml is missing."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler."""

    path: str
    version: tuple[int, int]
    """CUDA's release, such as (13, 0)."""

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]} ({self.path})"


def find_cmake() -> str:
    """The path of a CMake that is new enough: the environment's own, else the one on PATH."""
    return _find_program("cmake", MIN_CMAKE, r"cmake version (\d+)\.(\d+)")


def find_ninja() -> str:
    """The path of ninja: the environment's own, else the one on PATH."""
    return _find_program("ninja", (1, 10), r"(\d+)\.(\d+)")


def _find_program(name: str, minimum: tuple[int, int], pattern: str) -> str:
    wanted = f"{name} >= {minimum[0]}.{minimum[1]}"
    too_old = []
    for path in (shutil.which(name, path=sysconfig.get_path("scripts")), shutil.which(name)):
        if path is None:
            continue
        version = _version(path, pattern)
        if version is not None and version >= minimum:
            return path
        found = "does not run" if version is None else f"is {version[0]}.{version[1]}"
        too_old.append(f"{path} {found}")
    if too_old:
        raise BuildError(f"{wanted} is needed, but {' and '.join(too_old)}: {INSTALL_REQUIREMENTS}")
    raise BuildError(f"{wanted} is missing: {INSTALL_REQUIREMENTS}")


def _version(path: str, pattern: str) -> tuple[int, int] | None:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(pattern, output)
    return (int(found[1]), int(found[2])) if found else None


def check_host_compiler() -> None:
    """Raises BuildError unless there is a C++ compiler."""
    named = os.environ.get("CXX", "").split()
    names = named[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        what = f"CXX={named[0]} is not there" if named else "no C++ compiler found"
        raise BuildError(f"{what}: apt-get install g++ (version 10 or newer)")


def find_python_include() -> Path:
    """The folder of Python.h."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(f"no Python.h in {include}: apt-get install python{version}-dev (or python3-dev)")
    return include


def find_pybind11() -> Path:
    """The folder of pybind11's headers."""
    spec = importlib.util.find_spec("pybind11")
    if spec is None or spec.origin is None:
        raise BuildError(f"pybind11 >= 3.0 is missing: {INSTALL_REQUIREMENTS}")
    return Path(spec.origin).parent / "include"


def find_nvcc() -> Nvcc | None:
    """nvcc from CUDA_HOME, PATH or /usr/local/cuda; None: build for the CPU only.

    Raises:
        BuildError: it does not run or is too old, or `PAGEDINFER_CUDA=1` asks for one and there is none.
    """
    wish = os.environ.get("PAGEDINFER_CUDA", "")
    if wish not in ("", "0", "1"):
        raise BuildError(
            f"PAGEDINFER_CUDA={wish!r} must be 1 (compile CUDA), 0 (do not) or unset (if nvcc is there)"
        )
    if wish == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [str(Path(home) / "bin")] if home else []
    path = None
    for place in (*places, None, "/usr/local/cuda/bin"):
        path = shutil.which("nvcc", path=place)
        if path is not None:
            break
    if path is None:
        if wish == "1":
            raise BuildError(
                "PAGEDINFER_CUDA=1, but there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda"
            )
        return None
    version = _version(path, r"release (\d+)\.(\d+)")
    if version is None:
        raise BuildError(f"{path} does not run; set CUDA_HOME to a working toolkit, or PAGEDINFER_CUDA=0")
    if version < MIN_NVCC:
        raise BuildError(
            f"nvcc {version[0]}.{version[1]} ({path}) is too old: {MIN_NVCC[0]}.{MIN_NVCC[1]} or newer is "
            "needed; set CUDA_HOME to a newer toolkit, or PAGEDINFER_CUDA=0"
        )
    return Nvcc(path, version)


def build_jobs() -> int:
    """How many compilers may run at once: `MAX_JOBS`, else as many as cores and free memory bear."""
    wish = os.environ.get("MAX_JOBS")
    if wish:
        if not wish.isdecimal() or int(wish) < 1:
            raise BuildError(f"MAX_JOBS={wish!r} must be a positive whole number")
        return int(wish)
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // MEMORY_PER_JOB))


def free_memory() -> int:
    """Bytes that may still be used: the kernel's estimate, or the cgroup's limit where that is lower."""
    text = Path("/proc/meminfo").read_text()
    available = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    memory = int(available[1]) << 10 if available else MEMORY_PER_JOB
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(limit_file).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            memory = min(memory, int(limit))
    return memory
