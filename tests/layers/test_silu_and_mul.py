"""silu_and_mul against its oracle and against torch: dtypes, widths, strides, extreme values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests import reference
from tests.graph_capture import replay_captured

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def random_input(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (4 * torch.randn(shape, device=device)).to(dtype)


# silu(gate) is rounded before the product: in float16's subnormals by up to 3e-8, times an `up` of up to 20.
SUBNORMAL = {torch.float32: 0.0, torch.float16: 6e-7, torch.bfloat16: 0.0}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance, subnormal = TOLERANCE[actual.dtype], SUBNORMAL[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-4 * tolerance + subnormal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 64, 100, 1536, 4096, 14336])
def test_matches_reference(device: torch.device, dtype: torch.dtype, width: int) -> None:
    input = random_input(6, 2 * width, device=device, dtype=dtype)
    assert_near(ops.silu_and_mul(input), reference.silu_and_mul(input))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_where_torch_does(device: torch.device, dtype: torch.dtype) -> None:
    """Bit for bit but where the two exponentials round apart."""
    input = random_input(50, 2 * 4096, device=device, dtype=dtype)
    gate, up = input.chunk(2, dim=-1)
    different = ops.silu_and_mul(input) != torch.nn.functional.silu(gate) * up
    assert different.double().mean() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_gates(device: torch.device, dtype: torch.dtype) -> None:
    gates = [0.0, -0.0, -20.0, -88.0, -104.0, -60000.0, 88.0, 60000.0, float("inf")]
    gate = torch.tensor(gates, device=device).to(dtype)
    out = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate))))
    expected = gate.double().clamp(min=0)
    expected[2] = reference.silu_and_mul(torch.tensor([-20.0, 1.0]))[0]
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-7)


def test_nan_stays_in_its_element(device: torch.device) -> None:
    input = torch.ones(2, 64, device=device)
    input[0, 3] = input[1, 40] = float("nan")
    assert ops.silu_and_mul(input).isnan().nonzero().tolist() == [[0, 3], [1, 8]]


def test_takes_strided_rows(device: torch.device) -> None:
    wide = random_input(5, 3, 300, device=device, dtype=torch.bfloat16)
    out = torch.full((5, 3, 200), 7.0, device=device).bfloat16()
    ops.silu_and_mul(wide[..., 8:264], out[..., :128])
    assert_near(out[..., :128], reference.silu_and_mul(wide[..., 8:264]))
    assert (out[..., 128:] == 7).all()


def test_takes_a_storage_offset_of_one_element(device: torch.device) -> None:
    input = random_input(4 * 128 + 1, device=device, dtype=torch.bfloat16)[1:].view(4, 128)
    assert_near(ops.silu_and_mul(input), reference.silu_and_mul(input))


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 3, 4, 64), (0, 64), (3, 0)], ids=str)
def test_any_number_of_dimensions(device: torch.device, shape: tuple[int, ...]) -> None:
    input = random_input(*shape, device=device, dtype=torch.float32)
    assert_near(ops.silu_and_mul(input), reference.silu_and_mul(input))


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    input = torch.ones(4, 64, device=device)
    with pytest.raises(ValueError, match=r"input has shape \[4, 63\]; expected .* an even last dimension"):
        ops.silu_and_mul(input[:, 1:])
    with pytest.raises(ValueError, match=r"out has shape \[4, 64\]; .* last dimension of 32"):
        ops.silu_and_mul(input, torch.empty_like(input))
    with pytest.raises(ValueError, match="out has dtype float16; expected input's float32"):
        ops.silu_and_mul(input, torch.empty(4, 32, dtype=torch.float16, device=device))
    with pytest.raises(ValueError, match=r"input has shape .* strides .* last dimension contiguous"):
        ops.silu_and_mul(input.T.contiguous().T)


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    input, out = torch.randn(4, 64, device="cuda"), torch.zeros(4, 32, device="cuda")
    replay_captured(lambda: ops.silu_and_mul(input, out))
    assert_near(out, reference.silu_and_mul(input))


def test_opcheck(device: torch.device) -> None:
    args = (torch.randn(4, 64, device=device), torch.empty(4, 32, device=device))
    torch.library.opcheck(torch.ops.pagedinfer.silu_and_mul.default, args)
