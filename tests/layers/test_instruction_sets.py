"""The CPU kernels are compiled for several instruction sets: the same results from each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagedinfer import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def results() -> dict[str, Tensor]:
    """What each op gives on seeded inputs of lengths that no vector divides."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in DTYPES:
        x, residual = torch.randn(2, 3, 611, generator=generator).to(dtype)
        weight = torch.randn(611, generator=generator).to(dtype)
        found[f"rms_norm {dtype}"] = ops.rms_norm(x, weight, 1e-5, residual)
        found[f"residual {dtype}"] = residual
        heads = torch.randn(3, 2, 70, generator=generator).to(dtype)
        ops.rotary_embedding(torch.arange(3), heads, None, torch.randn(3, 62, generator=generator))
        found[f"rotary_embedding {dtype}"] = heads
        gated = 4 * torch.randn(3, 2 * 77, generator=generator)
        found[f"silu_and_mul {dtype}"] = ops.silu_and_mul(gated.to(dtype))
        if dtype != torch.float32:
            matrix = torch.randn(53, 611, generator=generator).to(dtype)
            found[f"half_linear {dtype}"] = ops.half_linear(x, matrix, matrix[:, 0].contiguous())
    return found


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_same_results_as_the_best_set(isa: str, tmp_path: Path) -> None:
    """Bit for bit where arithmetic is unfused; silu's exponential may use fused multiply-adds.

    half_linear sums in as many parts as vectors have lanes.
    """
    file = tmp_path / "results.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.layers.test_instruction_sets", str(file)],
        env=os.environ | {"PAGEDINFER_CPU_ISA": isa, "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        check=True,
    )
    expected = results()
    found = torch.load(file)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        exact = not name.startswith(("silu_and_mul", "half_linear"))
        tolerance = 0 if exact else 4 * torch.finfo(value.dtype).eps
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=0.01 * tolerance, msg=name)


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
