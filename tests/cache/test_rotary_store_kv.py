"""rotary_store_kv against the oracles of the ops that it stands for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests import reference
from tests.graph_capture import replay_captured

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
MAX_POSITION = 300
EPSILON = 1e-5


@dataclass
class Case:
    """The arguments of a call; every third token is padding, key and value are views of a fused QKV."""

    positions: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    cos_sin_cache: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    interleaved: bool = False
    query_norm_weight: Tensor | None = None
    key_norm_weight: Tensor | None = None

    def run(self) -> None:
        ops.rotary_store_kv(
            self.positions,
            self.query,
            self.key,
            self.value,
            self.cos_sin_cache,
            self.kv_cache,
            self.slot_mapping,
            interleaved=self.interleaved,
            query_norm_weight=self.query_norm_weight,
            key_norm_weight=self.key_norm_weight,
            epsilon=EPSILON,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """The query in float64, and the cache."""

        def turned(heads: Tensor, weight: Tensor | None) -> Tensor:
            if weight is not None:
                heads = reference.rms_norm(heads, weight, EPSILON)
            return reference.rotary_embedding(self.positions, heads, self.cos_sin_cache, self.interleaved)

        key = turned(self.key, self.key_norm_weight).to(self.key.dtype)
        cache = reference.store_kv(key, self.value, self.kv_cache, self.slot_mapping)
        return turned(self.query, self.query_norm_weight), cache


def random_case(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    num_tokens: int = 11,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    norm: bool = False,
    num_blocks: int = 9,
    block_size: int = 16,
) -> Case:
    table = reference.cos_sin_table(MAX_POSITION, head_dim if rotary_dim is None else rotary_dim)
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = torch.randn(num_tokens, sum(widths), device=device).to(dtype)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(widths, dim=1))
    whole = torch.randn(num_blocks, 3, 2, num_kv_heads, block_size, head_dim, device=device).to(dtype)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::3] = -1
    weights = (1 + torch.randn(2, head_dim, device=device) / 4).to(dtype)
    return Case(
        positions=torch.randint(0, MAX_POSITION, (num_tokens,), device=device),
        query=query,
        key=key,
        value=value,
        cos_sin_cache=table.to(device),
        kv_cache=whole[:, 1],
        slot_mapping=slots.to(device),
        interleaved=interleaved,
        query_norm_weight=weights[0] if norm else None,
        key_norm_weight=weights[1] if norm else None,
    )


def check(case: Case) -> None:
    expected_query, expected_cache = case.expected()
    key, value = case.key.clone(), case.value.clone()
    untouched = torch.ones(case.kv_cache.shape, dtype=torch.bool, device=key.device)
    untouched = reference.store_kv(
        torch.zeros_like(key, dtype=torch.bool),
        torch.zeros_like(key, dtype=torch.bool),
        untouched,
        case.slot_mapping,
    )
    before = case.kv_cache.clone()
    case.run()
    tolerance = TOLERANCE[key.dtype]
    torch.testing.assert_close(case.query.double(), expected_query, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.kv_cache, expected_cache, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.kv_cache[:, 1], expected_cache[:, 1], rtol=0, atol=0)
    assert torch.equal(case.kv_cache[untouched], before[untouched])
    assert torch.equal(case.key, key)
    assert torch.equal(case.value, value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*ops.HEAD_DIMS, 2, 6, 20])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
def test_matches_reference(
    device: torch.device, dtype: torch.dtype, head_dim: int, interleaved: bool, norm: bool
) -> None:
    check(random_case(device, dtype, head_dim=head_dim, interleaved=interleaved, norm=norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [2, 20, 32, 48, 80])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotates_only_the_first_rotary_dim_elements(
    device: torch.device, dtype: torch.dtype, rotary_dim: int, interleaved: bool
) -> None:
    for head_dim in (80, 88):  # 88: the unrotated rest may be an odd number of vectors
        check(
            random_case(
                device, dtype, head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved, norm=True
            )
        )


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (10, 1), (3, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
def test_many_tokens(
    device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int, norm: bool
) -> None:
    """Of which a thread of the GPU takes two heads, where their number is even."""
    check(
        random_case(
            device,
            torch.bfloat16,
            num_tokens=1025,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm=norm,
            num_blocks=70,
        )
    )


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
def test_blocks_of_any_size(device: torch.device, norm: bool) -> None:
    check(random_case(device, torch.bfloat16, norm=norm, num_tokens=60, block_size=12))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (32, 8), (64, 8), (7, 7)])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
def test_head_counts(device: torch.device, num_heads: int, num_kv_heads: int, norm: bool) -> None:
    check(
        random_case(
            device,
            torch.bfloat16,
            num_tokens=60,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            norm=norm,
        )
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
def test_equals_the_ops_that_it_stands_for(device: torch.device, dtype: torch.dtype, norm: bool) -> None:
    """Bit for bit without a norm; on a GPU the norms may add their squares in another order."""
    case = random_case(device, dtype, norm=norm)
    query, key, cache = case.query.clone(), case.key.clone(), case.kv_cache.clone()
    if norm:
        ops.rms_norm(query, case.query_norm_weight, EPSILON, out=query)
        ops.rms_norm(key, case.key_norm_weight, EPSILON, out=key)
    ops.rotary_embedding(case.positions, query, key, case.cos_sin_cache)
    ops.store_kv(key, case.value, cache, case.slot_mapping)
    case.run()
    tolerance = TOLERANCE[dtype] if norm and device.type == "cuda" else 0
    torch.testing.assert_close(case.query, query, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.kv_cache, cache, rtol=tolerance, atol=tolerance)


def test_norms_only_what_has_a_weight(device: torch.device) -> None:
    case = random_case(device, norm=True)
    case.query_norm_weight = None
    check(case)


def test_takes_a_storage_offset_of_one_element(device: torch.device) -> None:
    case = random_case(device, torch.bfloat16, norm=True)
    flat = torch.randn(case.query.numel() + 1, device=device).bfloat16()
    case.query = flat[1:].view(case.query.shape)
    check(case)


def test_no_tokens_is_fine(device: torch.device) -> None:
    check(random_case(device, num_tokens=0))


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    case = random_case(device, norm=True)
    case.key_norm_weight = case.key_norm_weight[:32]
    with pytest.raises(ValueError, match=r"key_norm_weight has shape \[32\]; expected \[head_dim=64\]"):
        case.run()
    case = random_case(device)
    case.slot_mapping = case.slot_mapping[1:]
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[10\]; expected \[num_tokens=11\]"):
        case.run()
    case = random_case(device)
    case.cos_sin_cache = torch.zeros(5, 66, device=device)
    with pytest.raises(ValueError, match="an even rotary_dim of at most head_dim=64"):
        case.run()
    case = random_case(device, head_dim=272)
    with pytest.raises(ValueError, match="expected a head_dim of at most 256"):
        case.run()


def test_refuses_ids_out_of_range_on_the_cpu() -> None:
    case = random_case(torch.device("cpu"))
    query, cache = case.query.clone(), case.kv_cache.clone()
    case.slot_mapping[10] = 144
    with pytest.raises(ValueError, match=r"slot_mapping\[10\] is 144; .* below 144"):
        case.run()
    case.slot_mapping[10] = 3
    case.positions[10] = MAX_POSITION
    with pytest.raises(ValueError, match=r"positions\[10\] is 300; expected one in \[0, 300\)"):
        case.run()
    assert torch.equal(case.query, query)
    assert torch.equal(case.kv_cache, cache)


@pytest.mark.gpu
def test_stores_unrotated_what_is_outside_the_table_on_the_gpu() -> None:
    case = random_case(torch.device("cuda"))
    case.positions[1], case.positions[2] = -1, MAX_POSITION
    query, slots = case.query[1:3].clone(), case.slot_mapping[1:3]
    case.run()
    assert torch.equal(case.query[1:3], query)
    assert torch.equal(case.kv_cache[slots // 16, 0, :, slots % 16], case.key[1:3])


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    case = random_case(torch.device("cuda"))
    expected_query, expected_cache = case.expected()
    replay_captured(case.run)
    torch.testing.assert_close(case.query.double(), expected_query, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.kv_cache, expected_cache, rtol=1e-5, atol=1e-5)


def test_opcheck(device: torch.device) -> None:
    case = random_case(device, norm=True)
    args = (
        case.positions,
        case.query.clone(),
        case.key.clone(),
        case.value.clone(),
        case.cos_sin_cache,
        case.kv_cache.clone(),
        case.slot_mapping,
        False,
        case.query_norm_weight,
        case.key_norm_weight,
        EPSILON,
    )
    torch.library.opcheck(torch.ops.pagedinfer.rotary_store_kv.default, args)
