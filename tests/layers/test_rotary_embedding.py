"""rotary_embedding against its oracle and against transformers: pairings, partial rotation, strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pagedinfer import ops
from tests import reference
from tests.graph_capture import replay_captured

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MAX_POSITION = 512


def cos_sin_table(rotary_dim: int, device: torch.device) -> Tensor:
    return reference.cos_sin_table(MAX_POSITION, rotary_dim).to(device)


def random_case(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    num_tokens: int = 11,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """positions, query, key; the two are split views of one fused QKV."""
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = torch.randn(num_tokens, sum(widths), device=device).to(dtype)
    query, key, _ = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(widths, dim=1))
    return torch.randint(0, MAX_POSITION, (num_tokens,), device=device), query, key


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def check(
    positions: Tensor, query: Tensor, key: Tensor | None, table: Tensor, interleaved: bool = False
) -> None:
    expected_query = reference.rotary_embedding(positions, query, table, interleaved)
    expected_key = None if key is None else reference.rotary_embedding(positions, key, table, interleaved)
    ops.rotary_embedding(positions, query, key, table, interleaved=interleaved)
    assert_near(query, expected_query)
    if key is not None:
        assert_near(key, expected_key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*ops.HEAD_DIMS, 2, 6])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_matches_reference(
    device: torch.device, dtype: torch.dtype, head_dim: int, interleaved: bool
) -> None:
    case = random_case(device, dtype, head_dim=head_dim)
    check(*case, cos_sin_table(head_dim, device), interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [2, 20, 32, 64])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotates_only_the_first_rotary_dim_elements(
    device: torch.device, dtype: torch.dtype, rotary_dim: int, interleaved: bool
) -> None:
    positions, query, key = random_case(device, dtype, head_dim=80)
    rest = query[..., rotary_dim:].clone()
    check(positions, query, key, cos_sin_table(rotary_dim, device), interleaved)
    assert torch.equal(query[..., rotary_dim:], rest)


@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads"), [(1, 1, 1), (3, 9, 3), (300, 32, 8)])
def test_head_counts(device: torch.device, num_tokens: int, num_heads: int, num_kv_heads: int) -> None:
    case = random_case(
        device, torch.bfloat16, num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    check(*case, cos_sin_table(64, device))


def test_touches_nothing_but_query_and_key(device: torch.device) -> None:
    """vllm PR#28103, PR#17091: split views of a fused QKV were taken for contiguous."""
    positions, query, key = random_case(device)
    value = query._base[:, -128:]
    before = value.clone()
    check(positions, query, key, cos_sin_table(64, device))
    assert torch.equal(value, before)


def test_key_may_be_missing(device: torch.device) -> None:
    positions, query, _ = random_case(device)
    check(positions, query, None, cos_sin_table(64, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_takes_a_storage_offset_of_one_element(device: torch.device, dtype: torch.dtype) -> None:
    positions = torch.arange(5, device=device)
    query = torch.randn(5 * 2 * 64 + 1, device=device).to(dtype)[1:].view(5, 2, 64)
    check(positions, query, None, cos_sin_table(64, device))


def test_equals_transformers_bit_for_bit(device: torch.device) -> None:
    positions, query, key = random_case(device)
    table = cos_sin_table(64, device)
    cos, sin = (part.repeat(1, 2).unsqueeze(0) for part in table[positions].split(32, dim=1))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    ops.rotary_embedding(positions, query, key, table)
    assert torch.equal(query, expected[0][0].transpose(0, 1))
    assert torch.equal(key, expected[1][0].transpose(0, 1))


def test_position_zero_changes_nothing(device: torch.device) -> None:
    _, query, key = random_case(device, torch.bfloat16)
    before = query.clone()
    ops.rotary_embedding(
        torch.zeros(11, dtype=torch.int64, device=device), query, key, cos_sin_table(64, device)
    )
    assert torch.equal(query, before)


def test_no_tokens_is_fine(device: torch.device) -> None:
    check(*random_case(device, num_tokens=0), cos_sin_table(64, device))


@pytest.mark.parametrize("position", [MAX_POSITION, -1, 2**40])
def test_refuses_positions_outside_the_table_on_the_cpu(position: int) -> None:
    positions, query, key = random_case(torch.device("cpu"))
    before = query.clone()
    positions[4] = position
    with pytest.raises(ValueError, match=rf"positions\[4\] is {position}; expected one in \[0, 512\)"):
        ops.rotary_embedding(positions, query, key, cos_sin_table(64, positions.device))
    assert torch.equal(query, before)


@pytest.mark.gpu
def test_leaves_tokens_outside_the_table_alone_on_the_gpu() -> None:
    positions, query, key = random_case(torch.device("cuda"))
    positions[4], positions[5] = MAX_POSITION, -1
    before = query[4:6].clone(), key[4:6].clone()
    ops.rotary_embedding(positions, query, key, cos_sin_table(64, positions.device))
    assert torch.equal(query[4:6], before[0])
    assert torch.equal(key[4:6], before[1])


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    positions, query, key = random_case(device)
    table = cos_sin_table(64, device)
    with pytest.raises(ValueError, match=r"key has shape \[11, 2, 32\]; expected .* head_dim=64"):
        ops.rotary_embedding(positions, query, key[..., :32], table)
    with pytest.raises(ValueError, match=r"query has shape .* strides .* contiguous"):
        ops.rotary_embedding(positions, query.mT.contiguous().mT, key, table)
    with pytest.raises(ValueError, match="key has dtype float16; expected query's float32"):
        ops.rotary_embedding(positions, query, key.half(), table)
    with pytest.raises(ValueError, match="positions has dtype int32; expected int64"):
        ops.rotary_embedding(positions.int(), query, key, table)
    with pytest.raises(ValueError, match="cos_sin_cache has dtype float64; expected float32"):
        ops.rotary_embedding(positions, query, key, table.double())
    for rotary_dim in (66, 63):
        bad_table = torch.zeros(MAX_POSITION, rotary_dim, device=device)
        with pytest.raises(ValueError, match=r"an even rotary_dim of at most head_dim=64"):
            ops.rotary_embedding(positions, query, key, bad_table)


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    positions, query, key = random_case(torch.device("cuda"))
    table = cos_sin_table(64, positions.device)
    expected = reference.rotary_embedding(positions, query, table)
    replay_captured(lambda: ops.rotary_embedding(positions, query, key, table))
    assert_near(query, expected)


def test_opcheck(device: torch.device) -> None:
    positions = torch.arange(5, device=device)
    query, key = torch.randn(2, 5, 2, 64, device=device).unbind()
    args = (positions, query.clone(), key.clone(), cos_sin_table(64, device), False)
    torch.library.opcheck(torch.ops.pagedinfer.rotary_embedding.default, args)
