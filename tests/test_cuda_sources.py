"""The CUDA sources compile for the oldest architecture too, which a build for one newer one does not show."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def errors_for_sm80(source: Path) -> str:
    """What nvcc says against it. -G: the front ends are what is tried here, and optimising takes long."""
    assert NVCC is not None
    command = [NVCC, "-std=c++20", "-arch=sm_80", "-G", "-ptx", "-o", os.devnull]
    command += [f"-I{CSRC}", "-DPAGEDINFER_WITH_CUDA", "--expt-relaxed-constexpr", str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_every_kernel_compiles_for_sm80() -> None:
    # The default build has sm_80, and what CI and most developers build has not.
    sources = sorted(CSRC.rglob("*.cu"))
    assert sources
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        errors = "".join(pool.map(errors_for_sm80, sources))
    assert not errors, errors
