"""rms_norm against its oracle and against transformers' module: dtypes, widths, strides, the residual."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pagedinfer import ops
from tests import reference
from tests.graph_capture import replay_captured

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HIDDEN_SIZES = [1, 7, 64, 80, 128, 576, 1000, 2048, 4096, 4100, 5120, 8192, 16384, 50000]
EPSILON = 1e-5
# Relative to the largest value of a row: a few roundings of the dtype, or float32's sum.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random_tensor(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected).abs().amax(-1)
    scale = expected.abs().amax(-1)
    assert (error <= TOLERANCE[actual.dtype] * scale + 1e-30).all(), (error / scale).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_matches_reference(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    input = random_tensor(5, hidden, device=device, dtype=dtype)
    weight = random_tensor(hidden, device=device, dtype=dtype)
    before = input.clone()
    assert_near(ops.rms_norm(input, weight, EPSILON), reference.rms_norm(input, weight, EPSILON))
    assert torch.equal(input, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_adds_the_residual_in_place(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    input = random_tensor(5, hidden, device=device, dtype=dtype)
    residual = random_tensor(5, hidden, device=device, dtype=dtype)
    weight = random_tensor(hidden, device=device, dtype=dtype)
    before = input.clone()
    expected, new_residual = reference.rms_norm_residual(input, weight, EPSILON, residual)
    assert_near(ops.rms_norm(input, weight, EPSILON, residual), expected)
    assert torch.equal(residual, new_residual)
    assert torch.equal(input, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 700])
def test_writes_over_the_input_if_asked(device: torch.device, dtype: torch.dtype, num_rows: int) -> None:
    input = random_tensor(num_rows, 576, device=device, dtype=dtype)
    residual = random_tensor(num_rows, 576, device=device, dtype=dtype)
    weight = random_tensor(576, device=device, dtype=dtype)
    expected, new_residual = reference.rms_norm_residual(input, weight, EPSILON, residual)
    assert ops.rms_norm(input, weight, EPSILON, residual, out=input) is input
    assert_near(input, expected)
    assert torch.equal(residual, new_residual)


@pytest.mark.parametrize("hidden", [64, 1000, 1024, 4096, 5120])
def test_many_rows(device: torch.device, hidden: int) -> None:
    """What the GPU does another way from 1,024 rows on."""
    input, residual = random_tensor(2, 1025, hidden, device=device, dtype=torch.bfloat16).unbind()
    weight = random_tensor(hidden, device=device, dtype=torch.bfloat16)
    assert_near(ops.rms_norm(input, weight, EPSILON), reference.rms_norm(input, weight, EPSILON))
    expected, new_residual = reference.rms_norm_residual(input, weight, EPSILON, residual)
    assert_near(ops.rms_norm(input, weight, EPSILON, residual), expected)
    assert torch.equal(residual, new_residual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_where_transformers_does(device: torch.device, dtype: torch.dtype) -> None:
    """Bit for bit but where the two sums of squares round apart."""
    module = LlamaRMSNorm(4096, EPSILON).to(device, dtype)
    module.weight.data = random_tensor(4096, device=device, dtype=dtype)
    input = random_tensor(50, 4096, device=device, dtype=dtype)
    different = ops.rms_norm(input, module.weight.data, EPSILON) != module(input)
    assert different.double().mean() < 2e-3


def test_normalises_the_heads_of_a_split_view(device: torch.device) -> None:
    """QK-norm, in place; vllm PR#28103, PR#17091: such rows were taken for contiguous."""
    qkv = random_tensor(9, (4 + 2 + 2) * 64, device=device, dtype=torch.float32)
    before = qkv.clone()
    key = qkv[:, 256:384].unflatten(1, (2, 64))
    weight = random_tensor(64, device=device, dtype=torch.float32)
    expected = reference.rms_norm(key, weight, EPSILON)
    ops.rms_norm(key, weight, EPSILON, out=key)
    assert_near(key, expected)
    assert torch.equal(qkv[:, :256], before[:, :256])
    assert torch.equal(qkv[:, 384:], before[:, 384:])


@pytest.mark.parametrize("hidden", [64, 1024])
def test_takes_a_storage_offset_of_one_element(device: torch.device, hidden: int) -> None:
    flat = random_tensor(3 * hidden + 1, device=device, dtype=torch.bfloat16)
    weight = random_tensor(hidden + 1, device=device, dtype=torch.bfloat16)[1:]
    input = flat[1:].view(3, hidden)
    assert_near(ops.rms_norm(input, weight, EPSILON), reference.rms_norm(input, weight, EPSILON))


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 3, 4, 64), (0, 64), (3, 0, 64)], ids=str)
def test_any_number_of_dimensions(device: torch.device, shape: tuple[int, ...]) -> None:
    input = random_tensor(*shape, device=device, dtype=torch.float32)
    weight = random_tensor(64, device=device, dtype=torch.float32)
    assert_near(ops.rms_norm(input, weight, EPSILON), reference.rms_norm(input, weight, EPSILON))


def test_zeros_stay_zeros_and_nan_stays_in_its_row(device: torch.device) -> None:
    input = random_tensor(4, 576, device=device, dtype=torch.bfloat16)
    input[1] = 0
    input[2, 5] = float("nan")
    out = ops.rms_norm(input, torch.ones(576, device=device).bfloat16(), EPSILON)
    assert not out[1].any()
    assert out.isnan().any(1).tolist() == [False, False, True, False]


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    input = random_tensor(4, 3, 64, device=device, dtype=torch.float32)
    weight = torch.ones(64, device=device)
    with pytest.raises(ValueError, match=r"input has shape \[4, 3, 64\]; expected \[..., hidden=32\]"):
        ops.rms_norm(input, weight[:32], EPSILON)
    with pytest.raises(ValueError, match="weight has dtype float16; expected input's float32"):
        ops.rms_norm(input, weight.half(), EPSILON)
    with pytest.raises(ValueError, match="input has dtype int64; expected float32, float16 or bfloat16"):
        ops.rms_norm(input.long(), weight, EPSILON)
    with pytest.raises(ValueError, match=r"input has shape .* strides .* last dimension contiguous"):
        ops.rms_norm(input.mT.contiguous().mT, weight, EPSILON)
    with pytest.raises(ValueError, match=r"input has shape .* before the last two with one stride"):
        ops.rms_norm(torch.ones(2, 3, 4, 64, device=device).transpose(0, 1), weight, EPSILON)
    with pytest.raises(ValueError, match=r"residual has shape \[4, 64\]; expected input's \[4, 3, 64\]"):
        ops.rms_norm(input, weight, EPSILON, input[:, 0].clone())
    with pytest.raises(ValueError, match="residual shares its memory"):
        ops.rms_norm(input, weight, EPSILON, input)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [5, 300, 1500])
def test_sees_what_the_kernel_before_wrote(num_rows: int) -> None:
    """Kernels start before the one ahead has ended: its residual and its output are the next one's input."""
    weight = torch.ones(4096, device="cuda").bfloat16()
    start, residual = random_tensor(2, num_rows, 4096, device=weight.device, dtype=torch.bfloat16).unbind()
    x, expected, expected_residual = start.clone(), start.clone(), residual.clone()
    for _ in range(20):
        ops.rms_norm(x, weight, EPSILON, residual, out=x)
    for _ in range(20):
        exact, expected_residual = reference.rms_norm_residual(expected, weight, EPSILON, expected_residual)
        expected = exact.bfloat16()
    # Values at a rounding's edge may go to either side, and differ by a unit in the last place or two.
    torch.testing.assert_close(residual, expected_residual, rtol=0.05, atol=0.05)
    torch.testing.assert_close(x, expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    input, residual, out = torch.randn(3, 4, 64, device="cuda").unbind()
    weight = torch.randn(64, device="cuda")
    expected, new_residual = reference.rms_norm_residual(input, weight, EPSILON, residual)
    replay_captured(lambda: ops.rms_norm(input, weight, EPSILON, residual, out))
    assert_near(out, expected)
    assert torch.equal(residual, new_residual)


@pytest.mark.parametrize("with_residual", [False, True])
def test_opcheck(device: torch.device, with_residual: bool) -> None:
    input, out, residual = torch.randn(3, 4, 64, device=device).unbind()
    args = (input, torch.ones(64, device=device), EPSILON, out, residual if with_residual else None)
    torch.library.opcheck(torch.ops.pagedinfer.rms_norm.default, args)
