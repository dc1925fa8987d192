"""What import says when the kernels cannot be loaded (vllm#2615, vllm#14942)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedinfer import kernel_library
from pagedinfer.kernel_library import BuildInfo, build_info, load_kernels

INFO = BuildInfo(torch="2.13.0+cu130", cuda="13.0.88", cuda_archs=("90a-real",), compiler="GNU 12.2.0")


def test_the_build_left_a_record() -> None:
    info = build_info()
    assert info is not None
    assert info.torch.startswith("2.")
    assert (info.cuda is None) == (info.cuda_archs == ())
    assert info.compiler


def test_the_kernels_load_and_loading_again_is_harmless() -> None:
    assert load_kernels() is torch.ops.pagedinfer
    assert load_kernels() is torch.ops.pagedinfer


def test_kernels_that_are_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "_PACKAGE", tmp_path)
    assert build_info() is None
    with pytest.raises(ImportError, match="kernels are not built") as error:
        load_kernels()
    assert "pip install -e ." in str(error.value)


def test_an_older_torch_is_refused_with_both_versions() -> None:
    message = kernel_library._load_problem("2.10.1+cu128", INFO, library_exists=True)
    assert message is not None
    assert "built with torch 2.13.0+cu130, for torch >= 2.11" in message
    assert "cannot be loaded under torch 2.10.1+cu128" in message
    assert "\n" not in message
    assert kernel_library._load_problem("2.11.0", INFO, library_exists=True) is None
    assert kernel_library._load_problem("3.0.0a0+git1", INFO, library_exists=True) is None


def test_a_library_that_the_loader_refuses_is_named_with_the_loader_s_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_kernels.so").write_bytes(b"this is no library")
    monkeypatch.setattr(kernel_library, "_PACKAGE", tmp_path)
    with pytest.raises(ImportError) as error:
        load_kernels()
    message = str(error.value)
    assert f"under torch {torch.__version__}" in message
    assert "_kernels.so" in message
    assert "file too short" in message or "invalid ELF header" in message
    assert "\n" not in message


def test_a_torch_changed_after_the_build_is_told_at_import(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.9.1'\n")
    root = Path(__file__).resolve().parents[1]
    code = "from pagedinfer.kernel_library import load_kernels; load_kernels()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    last_line = result.stderr.splitlines()[-1]
    info = build_info()
    assert result.returncode != 0
    assert info is not None
    assert last_line.startswith("ImportError: ")
    assert "torch 2.9.1" in last_line
    assert f"torch {info.torch}" in last_line


@pytest.mark.parametrize(
    ("archs", "has_it"),
    [
        (("80-real", "90a-real", "90-virtual"), True),
        (("90a-real",), True),
        (("80-virtual",), False),
        (("80-real", "100-real"), True),
        ((), False),
    ],
)
def test_hopper_code(archs: tuple[str, ...], has_it: bool) -> None:
    assert replace(INFO, cuda_archs=archs).has_hopper_code == has_it


@pytest.mark.parametrize(
    ("archs", "has_it"),
    [
        (("80-real", "90a-real", "90-virtual"), True),
        (("90a-real",), True),
        (("90-real",), False),
        (("90-virtual", "100-real"), False),
        ((), False),
    ],
)
def test_wgmma_code(archs: tuple[str, ...], has_it: bool) -> None:
    assert replace(INFO, cuda_archs=archs).has_wgmma_code == has_it
