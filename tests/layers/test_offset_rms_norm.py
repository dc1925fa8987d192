"""Gemma's RMSNorm, with its weight's distance from one and in one pass with a sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedinfer import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 7, 64, 256, 513, 2304, 5376]


def reference(input: Tensor, weight: Tensor, epsilon: float, addend: Tensor | None = None) -> Tensor:
    """As transformers' Gemma has it."""
    x = input.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    norm = (x * (1.0 + weight.float())).to(input.dtype)
    return norm if addend is None else addend + norm


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check(found: Tensor, expected: Tensor) -> None:
    """Within a rounding or two: a half type's last place is 2^-8 or 2^-11."""
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 9])
def test_equals_gemma_s(dtype: torch.dtype, width: int, rows: int, device: torch.device) -> None:
    input = 3 * random(rows, width, dtype=dtype, device=device)
    weight = 0.5 * random(width, dtype=dtype, device=device, seed=1)
    addend = random(rows, width, dtype=dtype, device=device, seed=2)
    check(ops.offset_rms_norm(input, weight, 1e-6), reference(input, weight, 1e-6))
    expected = reference(input, weight, 1e-6, addend)
    check(ops.offset_rms_norm(input, weight, 1e-6, addend), expected)
    assert ops.offset_rms_norm(input, weight, 1e-6, addend, addend) is addend
    check(addend, expected)


def test_there_is_one_rounding(device: torch.device) -> None:
    """1 + weight is no bfloat16, and is not made one: the result is the nearest to the exact product."""
    input = random(40, 512, dtype=torch.bfloat16, device=device)
    weight = 0.1 * random(512, dtype=torch.bfloat16, device=device, seed=1)
    x = input.double()
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.double())
    error = (ops.offset_rms_norm(input, weight, 1e-6).double() - exact).abs() / exact.abs()
    assert error.max() < 1.001 * 2.0**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_a_fused_projection(dtype: torch.dtype, device: torch.device) -> None:
    qkv = random(5, 8 * 256, dtype=dtype, device=device)
    query = qkv[:, 256 : 5 * 256].unflatten(-1, (4, 256))
    weight = random(256, dtype=dtype, device=device, seed=1)
    check(ops.offset_rms_norm(query, weight, 1e-6), reference(query, weight, 1e-6))


def test_rows_that_no_vector_fits(device: torch.device) -> None:
    memory = random(3, 131, dtype=torch.bfloat16, device=device)
    weight = random(128, dtype=torch.bfloat16, device=device, seed=1)
    for input in (memory[:, 1:129], memory[:, 3:131]):
        check(ops.offset_rms_norm(input, weight, 1e-6), reference(input, weight, 1e-6))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    input, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"input has shape \[2, 8\]; expected \[\.\.\., hidden=7\]"):
        ops.offset_rms_norm(input, weight[:7], 1e-6)
    with pytest.raises(ValueError, match="addend has shape"):
        ops.offset_rms_norm(input, weight, 1e-6, torch.ones(2, 7, device=device))
    with pytest.raises(ValueError, match="weight"):
        ops.offset_rms_norm(input, weight.bfloat16(), 1e-6)
