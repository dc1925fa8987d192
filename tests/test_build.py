"""The build as a whole: what it refuses, and that it compiles only what has changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LATEST = ROOT / "build" / "latest"

needs_build = pytest.mark.skipif(
    not (LATEST / "build.ninja").exists(), reason="built by other means than `make build` or pip"
)


@contextmanager
def touched(file: Path) -> Iterator[None]:
    """The file looks changed for a while."""
    before = file.stat()
    try:
        os.utime(file)
        yield
    finally:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def would_build() -> list[str]:
    """The steps that ninja would run now, without running them."""
    cmake = (LATEST / "cmake_command.json").read_text()
    ninja = re.search(r"CMAKE_MAKE_PROGRAM=([^\"]+)", cmake)
    assert ninja is not None
    if not Path(ninja[1]).exists():
        pytest.skip("built by pip in an isolated environment that is gone")
    output = subprocess.run(
        [ninja[1], "-C", str(LATEST), "-n"], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"^\[\d+/\d+\] (.*)$", output, re.MULTILINE)


@needs_build
def test_touching_one_file_compiles_one_object() -> None:
    if would_build():
        pytest.skip("the latest build is not of these sources")
    with touched(ROOT / "csrc/cache/store_kv.cpp"):
        steps = would_build()
    assert [step.split()[0] for step in steps] == ["Building", "Linking"]
    assert steps[0].endswith("store_kv.cpp.o")
    assert steps[1].endswith("_kernels.so")
    with touched(ROOT / "csrc/core.cpp"):
        steps = would_build()
    assert len(steps) == 2
    assert all("_core" in step for step in steps)
    assert not would_build()


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def make_torch(folder: Path, version: str) -> Path:
    torch = folder / "torch"
    torch.mkdir()
    (torch / "version.py").write_text(f"__version__ = '{version}'\ncuda = None\nhip = None\n")
    return torch


def test_pip_is_stopped_before_it_would_fetch_another_torch(tmp_path: Path) -> None:
    # pip asks for the metadata first, and fetches what they require before it builds.
    torch = make_torch(tmp_path, "2.8.0+cpu")
    result = run_setup("dist_info", "--output-dir", str(tmp_path), PAGEDINFER_TORCH_DIR=str(torch))
    errors = [line for line in result.stderr.splitlines() if line.startswith("pagedinfer: error:")]
    assert result.returncode != 0
    assert len(errors) == 1
    assert "torch 2.8.0+cpu is too old: pagedinfer needs torch >= 2.11" in errors[0]
    assert "Traceback" not in result.stderr


def test_a_missing_compiler_is_one_line(tmp_path: Path) -> None:
    result = run_setup("build_ext", "--build-lib", str(tmp_path), CXX="no-such-compiler")
    assert result.returncode != 0
    assert "pagedinfer: error: CXX=no-such-compiler is not there" in result.stderr
    assert "Traceback" not in result.stderr


def test_torch_is_not_a_build_requirement() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not [name for name in pyproject["build-system"]["requires"] if name.startswith("torch")]
    assert "torch>=2.11" in pyproject["project"]["dependencies"]


def test_the_oldest_torch_is_the_same_everywhere() -> None:
    from pagedinfer.kernel_library import MIN_TORCH

    major, minor = MIN_TORCH
    assert f"TORCH_TARGET_VERSION=0x{major:02x}{minor:02x}" in (ROOT / "CMakeLists.txt").read_text()
    build_side = (ROOT / "scripts/kernel_build/torch_install.py").read_text()
    assert f"MIN_TORCH = ({major}, {minor})" in build_side


def create_venv(folder: Path, path: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts/create_venv.sh"), str(folder)],
        env={"PATH": str(path), "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_the_system_lacks_is_named_at_once(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        "  *version_info*) exit 0 ;;\n"  # new enough
        "  *ensurepip*|*Python.h*) exit 1 ;;\n"  # neither venv nor headers
        "esac\n"
        "echo Python 3.12.9\n"
    )
    python.chmod(0o755)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = create_venv(tmp_path / "venv", empty, str(python))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "apt-get install python3-venv python3-dev g++" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_no_python_that_is_new_enough(tmp_path: Path) -> None:
    result = create_venv(tmp_path / "venv", tmp_path, "/no/such/python")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no Python >= 3.11 found (tried /no/such/python)" in result.stderr


def test_make_lists_its_targets() -> None:
    result = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True)
    targets = re.findall(r"make ([a-z-]+)", result.stdout)
    assert {"demo", "test", "lint", "bench", "clean", "wheel", "resources"} <= set(targets)
