"""decode_linear against float64: numbers of rows around its tiles, odd sizes, strides, graphs and chains."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.layers import decode_rows
from pagedinfer.layers.linear import linear
from pagedinfer.layers.mlp import GatedMLP
from pagedinfer.layers.placement import Placement
from tests.graph_capture import replay_captured

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def has_kernel(request: pytest.FixtureRequest) -> None:
    """Skips what runs on a GPU that the kernel is not for."""
    if "cuda" in request.node.name or request.node.get_closest_marker("gpu"):
        capability = torch.cuda.get_device_capability()
        if capability != (9, 0):
            pytest.skip(f"the kernel is for compute capability 9.0, and this is {capability}")


def random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def assert_near(
    actual: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> None:
    """Within the rounding to the dtype, and that of sums in float32."""
    expected = input.double() @ weight.double().T
    sizes = input.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected += bias.double()
        sizes += bias.double().abs()
    eps = torch.finfo(actual.dtype).eps
    allowed = eps / 2 * expected.abs() + 4e-6 * sizes + 6e-8  # the last: a half's subnormal
    if gated:  # each factor's error, silu's slope being 1.1 at most, and two roundings more
        gate, up = expected.chunk(2, dim=1)
        gate_error, up_error = allowed.chunk(2, dim=1)
        silu = gate * gate.sigmoid()
        expected = silu * up
        silu_error = 1.1 * gate_error + eps / 2 * silu.abs() + 6e-8
        allowed = silu_error * (up.abs() + up_error) + silu.abs() * up_error + eps / 2 * expected.abs() + 6e-8
    assert actual.shape == expected.shape
    assert actual.dtype == input.dtype
    assert ((actual.double() - expected).abs() <= 1.01 * allowed).all()


def check(rows: int, features: int, in_features: int, device: torch.device, dtype: torch.dtype) -> None:
    """With a bias and without, plain and gated, into an output full of NaN."""
    input = random(rows, in_features, device=device, dtype=dtype)
    weight = random(features, in_features, device=device, dtype=dtype) / in_features**0.5
    for bias in (None, random(features, device=device, dtype=dtype)):
        for gated in (False, True) if features % 16 == 0 else (False,):
            out_features = features // 2 if gated else features
            out = torch.full((rows, out_features), float("nan"), device=device, dtype=dtype)
            assert ops.decode_linear(input, weight, bias, gated=gated, out=out) is out
            assert_near(out, input, weight, bias, gated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 40, 50, 64, 72, 96, 100, 128])
def test_matches_float64(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    for features, in_features in ((2, 8), (80, 520), (130, 64), (384, 200)):
        check(rows, features, in_features, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 24, 64, 96, 128])
def test_layers_of_models(rows: int) -> None:
    """Sizes at which the work is cut in each way there is, and some that leave parts of tiles."""
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 3072), (4608, 3584)]
    for features, in_features in [*shapes, (18944, 3592), (1008, 16384)]:
        check(rows, features, in_features, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_takes_strided_rows(device: torch.device, dtype: torch.dtype) -> None:
    wide = random(20, 96, device=device, dtype=dtype)
    weight = random(10, 64, device=device, dtype=dtype)
    out = torch.full((20, 30), 7.0, device=device, dtype=dtype)
    ops.decode_linear(wide[:, 16:80], weight, out=out[:, 4:14])
    assert_near(out[:, 4:14], wide[:, 16:80], weight)
    assert (out[:, :4] == 7).all()
    assert (out[:, 14:] == 7).all()


def test_a_row_does_not_depend_on_what_is_in_others(device: torch.device) -> None:
    """NaN included."""
    input = random(40, 1024, device=device, dtype=torch.bfloat16)
    weight = random(304, 1024, device=device, dtype=torch.bfloat16)
    out = ops.decode_linear(input, weight)
    others = torch.full_like(input, float("nan"))
    others[7] = input[7]
    among_nan = ops.decode_linear(others, weight)
    assert torch.equal(among_nan[7], out[7])
    assert among_nan[:7].isnan().all()


def test_infinite_sums(device: torch.device) -> None:
    """Beyond the dtype a result is infinite, as torch's is."""
    input = torch.full((8, 64), 300.0, device=device, dtype=torch.float16)
    weight = torch.full((64, 64), 300.0, device=device, dtype=torch.float16)
    assert (ops.decode_linear(input, weight) == float("inf")).all()


def test_nothing_to_do(device: torch.device) -> None:
    weight = torch.ones(8, 64, device=device, dtype=torch.bfloat16)
    assert ops.decode_linear(weight[:0], weight).shape == (0, 8)
    assert ops.decode_linear(weight[:2], weight[:0]).shape == (2, 0)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    input = torch.ones(2, 64, device=device, dtype=torch.bfloat16)
    weight = torch.ones(8, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"input has shape \[129, 64\]; expected at most 128 rows"):
        ops.decode_linear(input[:1].expand(129, 64).contiguous(), weight)
    with pytest.raises(ValueError, match=r"weight has shape \[7, 64\]; expected a multiple of 2 rows"):
        ops.decode_linear(input, weight[:7])
    with pytest.raises(ValueError, match=r"weight has shape \[8, 64\]; expected a multiple of 16 rows, gate"):
        ops.decode_linear(input, weight, gated=True)
    with pytest.raises(ValueError, match="in_features"):
        ops.decode_linear(input[:, :32], weight)
    with pytest.raises(ValueError, match="expected in_features of at least 1"):
        ops.decode_linear(input[:, :0], weight[:, :0].contiguous())
    with pytest.raises(ValueError, match="out has shape"):
        ops.decode_linear(input, weight, out=input[:, :6])
    with pytest.raises(ValueError, match="input has dtype float32; expected float16 or bfloat16"):
        ops.decode_linear(input.float(), weight.float())
    with pytest.raises(ValueError, match="weight has dtype float16; expected input's bfloat16"):
        ops.decode_linear(input, weight.half())
    with pytest.raises(ValueError, match=r"input has strides .* rows that start at multiples of 16 bytes"):
        ops.decode_linear(input[:, 1:33], weight[:, :32].contiguous())
    with pytest.raises(ValueError, match="bias has shape"):
        ops.decode_linear(input, weight, input[0])


@pytest.mark.gpu
def test_chain_of_dependent_launches() -> None:
    """Each call reads what the one before has just written, hundreds of times in a graph."""
    device = torch.device("cuda")
    weights = [random(1024, 1024, device=device, dtype=torch.bfloat16) / 32 for _ in range(8)]
    start = random(100, 1024, device=device, dtype=torch.bfloat16)
    stream = start.clone()

    def run() -> None:
        hidden = start
        for i in range(200):
            hidden = ops.decode_linear(hidden, weights[i % 8])
        stream.copy_(hidden)

    run()
    once = stream.clone()
    for _ in range(3):
        replay_captured(run)
        assert torch.equal(stream, once)
    wanted = start.double()
    for i in range(200):
        wanted = (wanted @ weights[i % 8].double().T).to(torch.bfloat16).double()
    assert (once.double() - wanted).norm() / wanted.norm() < 0.05


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    """Two engines, or an urgent lane beside a batch; tiles are divided, each call's in its own way."""
    device = torch.device("cuda")
    weight = random(4096, 14336, device=device, dtype=torch.bfloat16)
    inputs = [random(rows, 14336, device=device, dtype=torch.bfloat16) for rows in (24, 64)]
    wanted = [ops.decode_linear(input, weight) for input in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for stream, input, outputs in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(ops.decode_linear(input, weight))
    torch.cuda.synchronize()
    for outputs, expected in zip(found, wanted, strict=True):
        assert all(torch.equal(out, expected) for out in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "uses"), [(1, False), (4, False), (24, True), (33, False)])
def test_layers_use_it_where_it_is_ahead(rows: int, uses: bool) -> None:
    device = torch.device("cuda")
    input = random(rows, 512, device=device, dtype=torch.bfloat16)
    weight = random(512, 512, device=device, dtype=torch.bfloat16) / 512**0.5
    with mock.patch.object(ops, "decode_linear", wraps=ops.decode_linear) as kernel:
        assert_near(linear(input, weight), input, weight)
    assert kernel.called == uses
    placement = Placement(torch.bfloat16, device)
    mlp = GatedMLP(512, 256, activation="silu", bias=False, placement=placement)
    for parameter in mlp.parameters():
        parameter.data.normal_(std=512**-0.5)
    with mock.patch.object(ops, "decode_linear", wraps=ops.decode_linear) as kernel:
        out = mlp(input)
    assert kernel.called == uses
    gate, up = (input.double() @ mlp.gate_up_proj.weight.double().T).chunk(2, dim=1)
    wanted = (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.double().T
    assert (out.double() - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.gpu
def test_is_used_for_more_rows_of_large_weights() -> None:
    weight = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert decode_rows.served(weight[:96], weight)
    assert decode_rows.served(weight[:96], weight, gated=True)
    assert not decode_rows.served(weight[:96], weight[:1024])
    assert not decode_rows.served(weight[:129], weight)
    assert not decode_rows.served(weight[:96].float(), weight.float())
    assert not decode_rows.served(weight[:96, 1:], weight[:, 1:])


def test_is_not_used_on_cpus() -> None:
    input = torch.ones(24, 64, dtype=torch.bfloat16)
    assert not decode_rows.served(input, input)


def test_opcheck(device: torch.device) -> None:
    input = torch.randn(8, 64, device=device).bfloat16()
    workspace = torch.empty(10_000, device=device)
    args = (input, input, None, False, 0, workspace, input.new_empty(8, 8))
    torch.library.opcheck(torch.ops.pagedinfer.decode_linear.default, args)
