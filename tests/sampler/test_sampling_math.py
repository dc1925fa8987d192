"""The arithmetic that CPU and CUDA share: its C++ on every float, and the oracle's copy of it."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests import reference

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++")

PHILOX_KNOWN_ANSWERS = [  # Random123's kat_vectors: counter, key, random words
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_header_on_every_float(tmp_path: Path) -> None:
    assert COMPILER is not None
    program = tmp_path / "check"
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", f"-I{ROOT / 'csrc'}"]
    if platform.machine() == "x86_64":
        flags.append("-march=native")
    source = Path(__file__).with_name("sampling_math_check.cpp")
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [
        "exponential rising 0 above_one 0 enough 1 error_below_3e-7 1",
        "ends 1 1 0 0 0",
        *(f"philox {words}" for _, _, words in PHILOX_KNOWN_ANSWERS),
        "bins 0 1 2047 2047 0",
        "upcast wrong 0",
    ]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_KNOWN_ANSWERS)
def test_the_oracles_philox(counter: tuple[int, int, int, int], key: tuple[int, int], words: str) -> None:
    assert " ".join(f"{word:08x}" for word in reference.philox4x32_10(counter, key)) == words


def test_the_oracles_fused_multiply_add_is_rounded_once() -> None:
    """Against exact fractions, on operands that make double rounding go wrong as often as they can."""
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, 3000)).astype(np.float32)
    # Sums whose float64 rounding lands on or next to a float32 tie.
    halfway = (a.astype(np.float64) * b + 1.0).astype(np.float32).astype(np.float64) * (1 + 2.0**-24)
    c = (halfway - a.astype(np.float64) * b).astype(np.float32)
    for x, y, z, result in zip(a, b, c, reference.fused_multiply_add(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(exact - Fraction(float(result)))
        for neighbour in (
            np.nextafter(result, np.float32(np.inf)),
            np.nextafter(result, np.float32(-np.inf)),
        ):
            assert error <= abs(exact - Fraction(float(neighbour)))


def test_the_oracles_exponential() -> None:
    z = -np.geomspace(1e-6, 43.9, 5000).astype(np.float32)
    e = reference.exponential(z).astype(np.float64)
    assert (np.abs(e / np.exp(z.astype(np.float64)) - 1) < 3e-7).all()
    ends = np.array([0.0, -0.0, -44.1, -math.inf, math.nan], np.float32)
    assert reference.exponential(ends).tolist() == [1, 1, 0, 0, 0]
