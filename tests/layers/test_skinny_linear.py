"""skinny_linear against the ops that it stands for: shapes, dtypes, each of its parts, alone and together."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests.graph_capture import replay_captured

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Two roundings of a half type that fall apart, and their sum with a residual.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPSILON = 1e-5


def random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def expected(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    """Op by op, the product in float64."""
    if norm_weight is not None:
        input = ops.rms_norm(input, norm_weight, EPSILON)
    product = input.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    out = product.to(input.dtype)
    if gated:
        out = ops.silu_and_mul(out)
    if residual is not None:
        out = (residual.double() + out.double()).to(input.dtype)
    return out


def assert_near(actual: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "features", "in_features"),
    [(1, 6, 8), (1, 300, 896), (2, 64, 1024), (3, 1, 4096), (4, 130, 3072), (1, 20, 14336)],
)
def test_matches_float64(
    device: torch.device, dtype: torch.dtype, rows: int, features: int, in_features: int
) -> None:
    input = random(rows, in_features, device=device, dtype=dtype)
    weight = random(features, in_features, device=device, dtype=dtype) / in_features**0.5
    assert_near(ops.skinny_linear(input, weight), expected(input, weight, None, None, False, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_every_combination_of_parts(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    features, in_features = 264, 520  # neither a multiple of what a warp takes
    input = random(rows, in_features, device=device, dtype=dtype)
    weight = random(features, in_features, device=device, dtype=dtype) / in_features**0.5
    for has_bias, has_norm, gated, has_residual in itertools.product((False, True), repeat=4):
        bias = random(features, device=device, dtype=dtype) if has_bias else None
        norm = random(in_features, device=device, dtype=dtype) if has_norm else None
        out_features = features // 2 if gated else features
        residual = random(rows, out_features, device=device, dtype=dtype) if has_residual else None
        wanted = expected(input, weight, bias, norm, gated, residual)
        out = ops.skinny_linear(
            input, weight, bias, norm_weight=norm, epsilon=EPSILON, gated=gated, residual=residual
        )
        assert_near(out, wanted)


def test_adds_to_the_residual_in_place(device: torch.device) -> None:
    input = random(2, 64, device=device, dtype=torch.float32)
    weight = random(16, 64, device=device, dtype=torch.float32)
    stream = random(2, 16, device=device, dtype=torch.float32)
    wanted = stream + input @ weight.T
    assert ops.skinny_linear(input, weight, residual=stream, out=stream) is stream
    torch.testing.assert_close(stream, wanted)


def test_takes_strided_rows(device: torch.device) -> None:
    wide = random(3, 96, device=device, dtype=torch.bfloat16)
    weight = random(10, 64, device=device, dtype=torch.bfloat16) / 8
    out = torch.full((3, 30), 7.0, device=device).bfloat16()
    residual = random(3, 12, device=device, dtype=torch.bfloat16)
    ops.skinny_linear(wide[:, 16:80], weight, residual=residual[:, 1:11], out=out[:, 5:15])
    assert_near(out[:, 5:15], expected(wide[:, 16:80], weight, None, None, False, residual[:, 1:11]))
    assert (out[:, :5] == 7).all()
    assert (out[:, 15:] == 7).all()


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Bit for bit, so that a request's tokens do not hang on who else is in a batch of one to four."""
    input = random(4, 1024, device=device, dtype=torch.bfloat16)
    weight = random(50, 1024, device=device, dtype=torch.bfloat16) / 32
    norm = random(1024, device=device, dtype=torch.bfloat16)
    together = ops.skinny_linear(input, weight, norm_weight=norm, epsilon=EPSILON)
    for rows in (1, 2, 3):
        alone = ops.skinny_linear(input[:rows], weight, norm_weight=norm, epsilon=EPSILON)
        assert torch.equal(alone, together[:rows])


def test_nan_stays_in_its_row(device: torch.device) -> None:
    input = random(2, 64, device=device, dtype=torch.float32)
    input[1, 3] = float("nan")
    out = ops.skinny_linear(input, random(8, 64, device=device, dtype=torch.float32))
    assert not out[0].isnan().any()
    assert out[1].isnan().all()


def test_nothing_to_do(device: torch.device) -> None:
    weight = torch.ones(8, 64, device=device)
    assert ops.skinny_linear(torch.ones(0, 64, device=device), weight).shape == (0, 8)
    assert ops.skinny_linear(torch.ones(2, 64, device=device), weight[:0]).shape == (2, 0)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    input, weight = torch.ones(2, 64, device=device), torch.ones(9, 64, device=device)
    with pytest.raises(ValueError, match=r"input has shape \[5, 64\]; expected at most 4 rows"):
        ops.skinny_linear(torch.ones(5, 64, device=device), weight)
    with pytest.raises(ValueError, match="in_features"):
        ops.skinny_linear(input[:, :32], weight)
    with pytest.raises(ValueError, match=r"weight has shape \[9, 64\]; expected an even number of rows"):
        ops.skinny_linear(input, weight, gated=True, out=input.new_empty(2, 4))
    with pytest.raises(ValueError, match=r"residual has shape \[2, 8\]; .* out_features=9"):
        ops.skinny_linear(input, weight, residual=input[:, :8])
    with pytest.raises(ValueError, match="out shares its memory with input"):
        ops.skinny_linear(input, torch.ones(64, 64, device=device), out=input)
    rows = torch.ones(3, 64, device=device)
    for shared in (rows[1:], rows[:2, 32:]):  # a row further on, the second half of each row
        weight_of_it = torch.ones(shared.shape[1], 64, device=device)
        with pytest.raises(ValueError, match="out shares its memory with input"):
            ops.skinny_linear(rows[:2], weight_of_it, out=shared)
    beside = torch.zeros(2, 128, device=device)
    ops.skinny_linear(beside[:, :64], torch.ones(64, 64, device=device), out=beside[:, 64:])
    for wrong in (torch.ones((), device=device), torch.ones(64, device=device)):
        with pytest.raises(ValueError, match=r"weight has shape \[(64)?\]; expected \[num_features"):
            ops.skinny_linear(input, wrong)
        with pytest.raises(ValueError, match=r"input has shape \[(64)?\]; expected \[num_rows"):
            ops.skinny_linear(wrong, weight)
    with pytest.raises(ValueError, match="weight has dtype float16; expected input's float32"):
        ops.skinny_linear(input, weight.half())
    with pytest.raises(ValueError, match="16"):
        ops.skinny_linear(input[:, 1:33], weight[:, :32].contiguous())
    with pytest.raises(ValueError, match="norm_weight has shape"):
        ops.skinny_linear(input, weight, norm_weight=torch.ones(32, device=device))


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    input, weight = torch.randn(2, 64, device="cuda"), torch.randn(8, 64, device="cuda")
    out = torch.zeros(2, 8, device="cuda")
    replay_captured(lambda: ops.skinny_linear(input, weight, out=out))
    torch.testing.assert_close(out, input @ weight.T)


@pytest.mark.gpu
def test_chain_of_dependent_launches() -> None:
    """Each call reads what the one before has just written, hundreds of times in a graph."""
    weights = [torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(8)]
    norm = torch.ones(256, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(2, 256, device="cuda", dtype=torch.bfloat16)
    stream = start.clone()

    def run() -> None:
        stream.copy_(start)
        for i in range(200):
            hidden = ops.skinny_linear(stream, weights[i % 8], norm_weight=norm, epsilon=EPSILON)
            ops.skinny_linear(hidden, weights[(i + 3) % 8], residual=stream, out=stream)

    run()
    once = stream.clone()
    replay_captured(run)
    assert torch.equal(stream, once)
    wanted = start.clone()
    for i in range(200):
        hidden = expected(wanted, weights[i % 8], None, norm, False, None)
        wanted = expected(hidden, weights[(i + 3) % 8], None, None, False, wanted)
    assert (stream.double() - wanted.double()).norm() / wanted.double().norm() < 0.05


def test_opcheck(device: torch.device) -> None:
    args = (torch.randn(2, 64, device=device), torch.randn(8, 64, device=device))
    more = (None, torch.ones(64, device=device), EPSILON, True, None, torch.empty(2, 4, device=device))
    torch.library.opcheck(torch.ops.pagedinfer.skinny_linear.default, (*args, *more))
