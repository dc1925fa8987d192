"""half_linear against float64: sizes off every vector's, strides, special values, any batch, any thread."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedinfer import ops
from pagedinfer.layers import linear as linear_layers

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_matrix(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(actual: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding to the dtype, and that of a sum in float32."""
    expected = input.double() @ weight.double().T
    sizes = input.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected += bias.double()
        sizes += bias.double().abs()
    assert actual.shape == expected.shape
    assert actual.dtype == input.dtype
    allowed = torch.finfo(actual.dtype).eps / 2 * expected.abs() + 1e-6 * sizes + 6e-8  # a half's subnormal
    assert ((actual.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 16, 37])
def test_matches_float64(num_rows: int, dtype: torch.dtype) -> None:
    for out_features in (1, 5, 24, 47, 48, 49, 150):
        for in_features in (1, 31, 32, 33, 576, 700):
            input = random_matrix(num_rows, in_features, dtype=dtype)
            weight = random_matrix(out_features, in_features, dtype=dtype)
            bias = random_matrix(out_features, dtype=dtype)
            assert_near(ops.half_linear(input, weight), input, weight)
            assert_near(ops.half_linear(input, weight, bias), input, weight, bias)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(0, 130), st.integers(0, 1500), st.sampled_from(DTYPES), st.booleans())
def test_matches_float64_at_any_size(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, has_bias: bool
) -> None:
    input = random_matrix(num_rows, in_features, dtype=dtype)
    weight = random_matrix(out_features, in_features, dtype=dtype)
    bias = random_matrix(out_features, dtype=dtype) if has_bias else None
    assert_near(ops.half_linear(input, weight, bias), input, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_are_packed_at_once(dtype: torch.dtype) -> None:
    input, weight = random_matrix(70, 30_011, dtype=dtype), random_matrix(50, 30_011, dtype=dtype)
    assert_near(ops.half_linear(input, weight), input, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    for in_features in (100, 576, 6000):
        input = random_matrix(300, in_features, dtype=dtype)
        weight = random_matrix(77, in_features, dtype=dtype)
        whole = ops.half_linear(input, weight)
        for rows in (slice(0, 1), slice(7, 9), slice(5, 22), slice(40, 297)):
            assert ops.half_linear(input[rows], weight).equal(whole[rows])
        for columns in (slice(0, 1), slice(20, 70)):
            assert ops.half_linear(input, weight[columns]).equal(whole[:, columns])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype: torch.dtype, threads: None) -> None:
    input, weight = random_matrix(40, 1000, dtype=dtype), random_matrix(500, 1000, dtype=dtype)
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(ops.half_linear(input, weight))
    assert all(result.equal(results[0]) for result in results)


def test_takes_strides() -> None:
    wide = random_matrix(5, 3, 300, dtype=torch.bfloat16)
    weight = random_matrix(40, 400, dtype=torch.bfloat16)[:, 7:107]
    out = torch.full((5, 3, 64), 7.0).bfloat16()
    ops.half_linear(wide[:, 1:, 50:150], weight, out=out[:, :2, 3:43])
    assert_near(out[:, :2, 3:43], wide[:, 1:, 50:150], weight)
    assert (out[:, 2] == 7).all()
    assert (out[..., :3] == 7).all()
    assert (out[..., 43:] == 7).all()


def test_takes_weights_that_share_their_rows() -> None:
    weight = random_matrix(1, 64, dtype=torch.float16).expand(30, 64)
    input = random_matrix(4, 64, dtype=torch.float16)
    assert_near(ops.half_linear(input, weight), input, weight)


@pytest.mark.parametrize("shape", [(64,), (2, 64), (2, 3, 64), (2, 3, 4, 64), (0, 64), (3, 0, 64)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    input, weight = random_matrix(*shape, dtype=torch.float16), random_matrix(9, 64, dtype=torch.float16)
    assert_near(ops.half_linear(input, weight), input, weight)


def test_without_inputs_there_is_the_bias() -> None:
    bias = random_matrix(9, dtype=torch.bfloat16)
    input, weight = torch.empty(2, 0).bfloat16(), torch.empty(9, 0).bfloat16()
    assert ops.half_linear(input, weight, bias).equal(bias.expand(2, 9))
    assert ops.half_linear(input, weight).equal(torch.zeros(2, 9).bfloat16())
    assert ops.half_linear(torch.ones(2, 8).half(), torch.empty(0, 8).half()).shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_row_and_column(dtype: torch.dtype) -> None:
    nan, infinity = float("nan"), float("inf")
    for in_features in (33, 64):  # in the last element, also of a step that is filled with zeros
        input, weight = torch.ones(5, in_features).to(dtype), torch.ones(50, in_features).to(dtype)
        input[1, -1], input[3, 0], weight[2, -1] = nan, infinity, nan
        out = ops.half_linear(input, weight)
        assert out.isnan().sum() == 50 + 5 - 1
        assert out[1].isnan().all()
        assert out[:, 2].isnan().all()
        assert out[3].isinf().sum() == 49
    large = torch.full((1, 2), 60_000.0).to(dtype)
    assert ops.half_linear(large, torch.full((1, 2), 2.0).to(dtype)).isinf().item() == (
        dtype == torch.float16
    )


def test_subnormals_of_float16_are_not_lost() -> None:
    smallest = torch.full((2, 64), 2.0**-24).half()
    assert (ops.half_linear(smallest, torch.full((3, 64), 1024.0).half()) == 2.0**-8).all()


def test_refuses_what_does_not_fit() -> None:
    input, weight = torch.ones(4, 64).half(), torch.ones(8, 64).half()
    with pytest.raises(ValueError, match=r"input has shape \[4, 63\]; expected \[\.\.\., in_features=64\]"):
        ops.half_linear(input[:, 1:], weight)
    with pytest.raises(ValueError, match=r"weight has shape \[64\]; expected \[out_features, in_features\]"):
        ops.half_linear(input, weight[0], out=torch.empty(4, 1).half())
    with pytest.raises(ValueError, match=r"weight has shape \[\]; expected \[out_features, in_features\]"):
        ops.half_linear(input, weight[0, 0])
    with pytest.raises(ValueError, match=r"bias has shape \[7\]; expected \[out_features=8\]"):
        ops.half_linear(input, weight, torch.ones(7).half())
    with pytest.raises(ValueError, match=r"out has shape \[4, 9\]; expected .* last dimension of 8"):
        ops.half_linear(input, weight, out=torch.empty(4, 9).half())
    with pytest.raises(ValueError, match="input has dtype float32; expected float16 or bfloat16"):
        ops.half_linear(input.float(), weight.float())
    with pytest.raises(ValueError, match="weight has dtype bfloat16; expected input's float16"):
        ops.half_linear(input, weight.bfloat16())
    with pytest.raises(ValueError, match="bias has dtype float32; expected input's float16"):
        ops.half_linear(input, weight, torch.ones(8))
    with pytest.raises(ValueError, match=r"weight has shape .* strides .* last 1 dimension\(s\) contiguous"):
        ops.half_linear(input, torch.ones(64, 8).half().T)
    with pytest.raises(ValueError, match=r"input has shape .* strides .* last dimension contiguous"):
        ops.half_linear(torch.ones(64, 4).half().T, weight)
    with pytest.raises(ValueError, match="weight has dtype float32; expected float16 or bfloat16"):
        ops.half_linear_pays(torch.float32)


@pytest.mark.gpu
def test_refuses_what_is_on_a_gpu() -> None:
    weight = torch.ones(8, 64, device="cuda").half()
    with pytest.raises(ValueError, match="input is on cuda:0; expected cpu"):
        ops.half_linear(weight, weight)


def test_opcheck() -> None:
    input, weight, bias = torch.randn(4, 64).half(), torch.randn(8, 64).half(), torch.randn(8).half()
    torch.library.opcheck(
        torch.ops.pagedinfer.half_linear.default, (input, weight, bias, torch.empty(4, 8).half())
    )


# ---- where the layers use it ----


@pytest.mark.parametrize("pays", [False, True])
def test_layers_take_it_where_it_pays(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(ops, "half_linear_pays", lambda dtype: pays)
    monkeypatch.setattr(ops, "half_linear", lambda *args: called.append(args) or args[0])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        linear_layers.linear(torch.ones(2, 8).to(dtype), torch.ones(8, 8).to(dtype))
    assert len(called) == (2 if pays else 0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere nobody looks")
@pytest.mark.parametrize(
    ("dtype", "flag"), [(torch.float16, "avx512_fp16"), (torch.bfloat16, "avx512_bf16")], ids=str
)
def test_pays_where_the_cpu_must_convert(dtype: torch.dtype, flag: str) -> None:
    if "PAGEDINFER_CPU_ISA" in os.environ:
        pytest.skip("this CPU is taken for a lesser one")
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii").split()
    assert ops.half_linear_pays(dtype) == (flag not in flags)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups may be empty, the first and the last too."""
    input, weights = random_matrix(9, 64, dtype=dtype), random_matrix(5, 32, 64, dtype=dtype)
    ends = torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32)
    for pays in (False, True):
        monkeypatch.setattr(ops, "half_linear_pays", lambda dtype, pays=pays: pays)
        output = linear_layers.grouped_linear(input, weights, ends)
        assert_near(output[:4], input[:4], weights[1])
        assert_near(output[4:], input[4:], weights[3])
