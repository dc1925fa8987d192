"""store_kv against its oracle: every dtype and shape, strided inputs, padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests import reference
from tests.graph_capture import replay_captured

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_case(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    num_tokens: int = 13,
    num_blocks: int = 7,
    num_kv_heads: int = 2,
    block_size: int = 8,
    head_dim: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """key, value, the cache of the middle one of three layers, and slots, every third one padding."""
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_dim, device=device).to(dtype)
    whole = torch.randn(num_blocks, 3, 2, num_kv_heads, block_size, head_dim, device=device).to(dtype)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::3] = -1
    return key, value, whole[:, 1], slots.to(device)


def check(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    expected = reference.store_kv(key, value, kv_cache, slots)
    ops.store_kv(key, value, kv_cache, slots)
    torch.testing.assert_close(kv_cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", ops.HEAD_DIMS)
@pytest.mark.parametrize("block_size", ops.BLOCK_SIZES)
def test_matches_reference(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    check(*random_case(device, dtype, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(("num_tokens", "num_kv_heads", "head_dim"), [(1, 1, 1), (5, 3, 7), (200, 5, 12)])
def test_takes_sizes_that_no_vector_divides(
    device: torch.device, num_tokens: int, num_kv_heads: int, head_dim: int
) -> None:
    check(
        *random_case(
            device,
            torch.float16,
            num_tokens=num_tokens,
            num_blocks=40,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
    )


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(2, 64, 16), (8, 128, 16), (3, 5, 12)])
def test_many_tokens(device: torch.device, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """What the GPU takes two at a time; one is left over."""
    check(
        *random_case(
            device,
            torch.bfloat16,
            num_tokens=1025,
            num_blocks=100,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
        )
    )


def test_writes_only_the_slots_it_is_given(device: torch.device) -> None:
    """vllm PR#43869: padding (-1) overwrote the last slot of the cache."""
    key, value, kv_cache, _ = random_case(device, num_tokens=3)
    before = kv_cache.clone()
    ops.store_kv(key, value, kv_cache, torch.tensor([3, -1, -1], device=device))
    changed = (kv_cache != before).any(-1).any(2).any(1)  # [num_blocks, block_size]
    assert changed.nonzero().tolist() == [[0, 3]]
    torch.testing.assert_close(kv_cache[0, 0, :, 3], key[0], rtol=0, atol=0)
    torch.testing.assert_close(kv_cache[0, 1, :, 3], value[0], rtol=0, atol=0)


def test_leaves_garbage_where_it_is(device: torch.device) -> None:
    """vllm PR#57158: NaN in padding rows and in unused slots stays out of what is used."""
    key, value, kv_cache, slots = random_case(device)
    kv_cache.fill_(float("nan"))
    key[slots < 0] = value[slots < 0] = float("nan")
    check(key, value, kv_cache, slots)
    assert kv_cache.isfinite().sum() == 2 * int((slots >= 0).sum()) * key.shape[1] * key.shape[2]


def test_takes_split_views_of_a_fused_qkv(device: torch.device) -> None:
    """vllm PR#28103, PR#17091: kernels that assumed contiguous rows gave wrong values."""
    _, _, kv_cache, slots = random_case(device, torch.bfloat16)
    qkv = torch.randn(len(slots), (4 + 2 + 2) * 64, device=device).bfloat16()
    _, key, value = (part.unflatten(1, (-1, 64)) for part in qkv.split([256, 128, 128], dim=1))
    check(key, value, kv_cache, slots)


def test_takes_a_storage_offset_of_one_element(device: torch.device) -> None:
    _, _, kv_cache, slots = random_case(device, torch.bfloat16)
    flat = torch.randn(2 * (len(slots) * 128 + 1), device=device).bfloat16()
    key, value = (part[1:].view(-1, 2, 64) for part in flat.chunk(2))
    check(key, value, kv_cache, slots)


def test_no_tokens_is_fine(device: torch.device) -> None:
    check(*random_case(device, num_tokens=0))


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    key, value, kv_cache, slots = random_case(device)
    with pytest.raises(ValueError, match=r"value has shape \[13, 1, 64\]; expected .*num_kv_heads=2"):
        ops.store_kv(key, value[:, :1], kv_cache, slots)
    with pytest.raises(ValueError, match=r"key has shape .* and strides .* contiguous"):
        ops.store_kv(key.mT.contiguous().mT, value, kv_cache, slots)
    with pytest.raises(ValueError, match="value has dtype float16; expected key's float32"):
        ops.store_kv(key, value.half(), kv_cache, slots)
    with pytest.raises(ValueError, match="slot_mapping has dtype int32; expected int64"):
        ops.store_kv(key, value, kv_cache, slots.int())
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[12\]"):
        ops.store_kv(key, value, kv_cache, slots[1:])


@pytest.mark.parametrize("slot", [56, -2, 2**40])
def test_refuses_slots_out_of_range_on_the_cpu(slot: int) -> None:
    key, value, kv_cache, slots = random_case(torch.device("cpu"))
    before = kv_cache.clone()
    slots[7] = slot
    with pytest.raises(ValueError, match=rf"slot_mapping\[7\] is {slot}; .* below 56"):
        ops.store_kv(key, value, kv_cache, slots)
    assert torch.equal(kv_cache, before)


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    key, value, kv_cache, slots = random_case(torch.device("cuda"))
    replay_captured(lambda: ops.store_kv(key, value, kv_cache, slots))
    assert torch.equal(kv_cache, reference.store_kv(key, value, kv_cache, slots))


def test_opcheck(device: torch.device) -> None:
    torch.library.opcheck(torch.ops.pagedinfer.store_kv.default, random_case(device))
