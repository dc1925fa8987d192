"""One build: settings -> a folder under build/ that stays -> the modules, copied to where they are wanted."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernel_build import toolchain
from kernel_build.cuda_archs import cuda_archs
from kernel_build.errors import BuildError, say
from kernel_build.toolchain import Nvcc
from kernel_build.torch_install import TorchInstall, find_torch

KERNELS = "_kernels.so"
CORE = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
BUILD_INFO = "_build_info.json"
"""Written by CMake: which torch, compiler and architectures the modules were built with."""
MODULES = (KERNELS, CORE, BUILD_INFO)


@dataclass(frozen=True)
class BuildSettings:
    """All that a build depends on, beside the sources."""

    torch: TorchInstall
    cmake: str
    ninja: str
    pybind11: Path
    python_include: Path
    nvcc: Nvcc | None
    """None: CPU only."""
    archs: tuple[str, ...]
    """CUDA architectures in CMake's spelling; empty without nvcc."""
    jobs: int

    @property
    def key(self) -> str:
        """Names the folder of this build. Same key: the same object files can be used again.

        The Python version is not in it: only _core depends on it, and that is quick to compile.
        """
        place = hashlib.sha256(str(self.torch.directory).encode()).hexdigest()[:6]
        kernels = "cpu"
        if self.nvcc is not None:
            archs = "-".join(arch.removesuffix("-real").replace("-virtual", "ptx") for arch in self.archs)
            kernels = f"cuda{self.nvcc.version[0]}.{self.nvcc.version[1]}-{archs}"
        return f"torch{self.torch.version}-{place}-{kernels}"


def find_settings() -> BuildSettings:
    """Looks at the machine and the environment, and says what was found.

    Raises:
        BuildError: something is missing.
    """
    toolchain.check_host_compiler()
    torch = find_torch()
    say(f"using {torch}")
    nvcc = toolchain.find_nvcc()
    archs = cuda_archs(nvcc) if nvcc is not None else ()
    if nvcc is not None:
        say(f"compiling the CPU and the CUDA kernels; {nvcc}, architectures {', '.join(archs)}")
    elif os.environ.get("PAGEDINFER_CUDA") == "0":
        say("compiling the CPU kernels only (PAGEDINFER_CUDA=0)")
    else:
        say("*** NO nvcc (looked in CUDA_HOME, on PATH, in /usr/local/cuda): BUILDING FOR THE CPU ONLY ***")
    return BuildSettings(
        torch=torch,
        cmake=toolchain.find_cmake(),
        ninja=toolchain.find_ninja(),
        pybind11=toolchain.find_pybind11(),
        python_include=toolchain.find_python_include(),
        nvcc=nvcc,
        archs=archs,
        jobs=toolchain.build_jobs(),
    )


def build(source: Path, settings: BuildSettings) -> Path:
    """Builds what is out of date, in build/<key>; returns the folder that holds the MODULES.

    Raises:
        BuildError: CMake or a compiler failed; their output has been shown.
    """
    start = time.monotonic()
    folder = source / "build" / settings.key
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        modules = folder / "modules"
        _configure(source, folder, modules, settings)
        say(f"building in {folder.relative_to(source)} with {settings.jobs} jobs (MAX_JOBS changes that)")
        _run([settings.ninja, "-C", str(folder), "-j", str(settings.jobs)])
    _point_to(source / "build" / "latest", Path(settings.key))
    _point_to(source / "compile_commands.json", Path("build") / settings.key / "compile_commands.json")
    sizes = ", ".join(f"{name} {(modules / name).stat().st_size / 1e6:.1f} MB" for name in (KERNELS, CORE))
    say(f"built in {time.monotonic() - start:.1f} s: {sizes}")
    return modules


def copy_modules(modules: Path, destination: Path) -> None:
    """Puts the built modules into a package folder; a process that runs with the old ones keeps them."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        target = destination / name
        if target.exists() and _same(modules / name, target):
            continue
        staged = destination / f".{name}.new"
        shutil.copy2(modules / name, staged)
        staged.replace(target)


def _same(left: Path, right: Path) -> bool:
    a, b = left.stat(), right.stat()
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def _configure(source: Path, folder: Path, modules: Path, settings: BuildSettings) -> None:
    """Runs CMake unless it has run with these very arguments; ninja does so when CMakeLists.txt changes."""
    command = [
        settings.cmake,
        "-S",
        str(source),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={settings.ninja}",
        f"-DPAGEDINFER_TORCH_DIR={settings.torch.directory}",
        f"-DPAGEDINFER_PYBIND11_DIR={_kept_pybind11(folder, settings.pybind11)}",
        f"-DPAGEDINFER_PYTHON_INCLUDE={settings.python_include}",
        f"-DPAGEDINFER_PYTHON_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}",
        f"-DPAGEDINFER_OUTPUT_DIR={modules}",
    ]
    if settings.nvcc is None:
        command.append("-DPAGEDINFER_CUDA=OFF")
    else:
        command += [
            "-DPAGEDINFER_CUDA=ON",
            f"-DPAGEDINFER_CUDA_ARCHS={';'.join(settings.archs)}",
            f"-DCMAKE_CUDA_COMPILER={settings.nvcc.path}",
        ]
    record = folder / "cmake_command.json"
    if (folder / "build.ninja").exists() and record.exists() and json.loads(record.read_text()) == command:
        return
    record.unlink(missing_ok=True)
    _run(command)
    record.write_text(json.dumps(command, indent=1))


def _kept_pybind11(folder: Path, include: Path) -> Path:
    """A copy of pybind11's headers in the build folder.

    pip's isolated build has them in another temporary folder each time, which would compile _core anew at
    every build and leave clangd without them.
    """
    kept = folder / f"pybind11-{importlib.metadata.version('pybind11')}"
    if not kept.exists():
        staged = folder / "pybind11.new"
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(include, staged)
        staged.rename(kept)
    return kept


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        name = Path(command[0]).name
        raise BuildError(f"{name} failed with exit code {error.returncode}; its message is above") from None


def _point_to(link: Path, target: Path) -> None:
    staged = link.with_name(f".{link.name}.new")
    staged.unlink(missing_ok=True)
    staged.symlink_to(target)
    staged.replace(link)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two builds in one folder wait for each other."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
