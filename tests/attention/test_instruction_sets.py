"""The CPU kernel as compiled for the instruction sets below this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lower_instruction_set(isa: str) -> None:
    """The choice is made when the library is first used, so each takes a process of its own."""
    tests = Path(__file__).with_name("test_paged_attention.py")
    chosen = "cpu and (mixed_batch or boundaries or logit_cap or magnitudes)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests), "-k", chosen],
        env={**os.environ, "PAGEDINFER_CPU_ISA": isa},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
