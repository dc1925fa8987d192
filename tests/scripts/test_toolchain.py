"""What the build says when a tool is missing, too old, or asked for and not there."""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from pathlib import Path

import pytest
from kernel_build import toolchain
from kernel_build.errors import BuildError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program that prints some text on an otherwise empty PATH; no other place has one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "no-such-folder"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "PAGEDINFER_CUDA"):
        monkeypatch.delenv(name, raising=False)

    def make(name: str, output: str, folder: Path = folder) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / name
        file.write_text(f"#!/bin/sh\necho '{output}'\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    return make


def test_cmake_is_found(program) -> None:
    path = program("cmake", "cmake version 4.1.2")
    assert toolchain.find_cmake() == path


def test_an_old_cmake_is_named_with_what_is_needed(program) -> None:
    path = program("cmake", "cmake version 3.25.1")
    with pytest.raises(BuildError, match=rf"cmake >= 3\.27 is needed, but {path} is 3\.25.*pip install"):
        toolchain.find_cmake()


def test_the_environment_s_cmake_comes_before_an_old_one_on_the_path(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("cmake", "cmake version 3.25.1")
    scripts = tmp_path / "scripts"
    path = program("cmake", "cmake version 3.31.0", folder=scripts)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts))
    assert toolchain.find_cmake() == path


def test_no_ninja(program) -> None:
    with pytest.raises(BuildError, match=r"ninja >= 1\.10 is missing: pip install"):
        toolchain.find_ninja()


def test_no_compiler(program, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found: apt-get install g\+\+"):
        toolchain.check_host_compiler()
    program("g++", "")
    toolchain.check_host_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(BuildError, match="CXX=no-such-compiler is not there"):
        toolchain.check_host_compiler()


def test_no_python_headers(program) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(BuildError, match=rf"no Python\.h in .*apt-get install python{version}-dev"):
        toolchain.find_python_include()


def test_nvcc_of_cuda_home_comes_before_the_one_on_the_path(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program("nvcc", "Cuda compilation tools, release 12.8, V12.8.1")
    assert toolchain.find_nvcc() == toolchain.Nvcc(path, (12, 8))
    home = tmp_path / "toolkit"
    path = program("nvcc", "Cuda compilation tools, release 13.0, V13.0.88", folder=home / "bin")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert toolchain.find_nvcc() == toolchain.Nvcc(path, (13, 0))


def test_cuda_can_be_switched_off(program, monkeypatch: pytest.MonkeyPatch) -> None:
    program("nvcc", "release 13.0")
    monkeypatch.setenv("PAGEDINFER_CUDA", "0")
    assert toolchain.find_nvcc() is None
    monkeypatch.setenv("PAGEDINFER_CUDA", "off")
    with pytest.raises(BuildError, match="PAGEDINFER_CUDA='off' must be 1"):
        toolchain.find_nvcc()


def test_an_old_nvcc_and_one_that_does_not_run_are_errors(program) -> None:
    program("nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    with pytest.raises(BuildError, match=r"nvcc 11\.8 \(.*\) is too old: 12\.0 or newer"):
        toolchain.find_nvcc()
    program("nvcc", "Segmentation fault")
    with pytest.raises(BuildError, match="nvcc does not run"):
        toolchain.find_nvcc()


def test_jobs_follow_max_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.build_jobs() == 3
    for wrong in ("0", "-1", "two"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(BuildError, match=f"MAX_JOBS='{wrong}' must be a positive whole number"):
            toolchain.build_jobs()


@pytest.mark.parametrize(("gib", "jobs"), [(1, 1), (8, 4), (7.5, 3), (512, 64)])
def test_jobs_do_not_exhaust_the_memory(monkeypatch: pytest.MonkeyPatch, gib: float, jobs: int) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(toolchain, "free_memory", lambda: int(gib * 2**30))
    assert toolchain.build_jobs() == jobs


def test_free_memory_is_what_the_machine_has() -> None:
    assert 2**20 < toolchain.free_memory() < 2**50
