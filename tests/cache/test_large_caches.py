"""Caches whose offsets do not fit 32 bits (vllm#1486, flashinfer PR#3136)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedinfer import ops

NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 16, 128
BLOCK_ELEMENTS = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM


def large_cache(log2_elements: int, device: torch.device) -> Tensor:
    """A cache of one layer with more elements than that; its blocks hold whatever the memory held.

    On the CPU only the pages that are touched become real.
    """
    num_blocks = 2**log2_elements // BLOCK_ELEMENTS + 3
    shape = (num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    try:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no memory for {num_blocks} blocks: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("log2_elements", [31, 32])
def test_first_middle_and_last_block(device: torch.device, log2_elements: int) -> None:
    cache = large_cache(log2_elements, device)
    num_blocks = len(cache)
    first, middle, last = blocks = [0, num_blocks // 2, num_blocks - 1]
    neighbours = [1, middle - 1, middle + 1, last - 1]
    for block in (*blocks, *neighbours):
        cache[block] = 0

    key, value = torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM, device=device).bfloat16().unbind()
    slots = torch.tensor([block * BLOCK_SIZE + 5 for block in blocks], device=device)
    ops.store_kv(key, value, cache[:, 0], slots)
    for i, block in enumerate(blocks):
        assert torch.equal(cache[block, 0, 0, :, 5], key[i])
        assert torch.equal(cache[block, 0, 1, :, 5], value[i])
        assert int(cache[block].count_nonzero()) == int(torch.stack((key[i], value[i])).count_nonzero())

    before = [cache[block].clone() for block in blocks]
    ops.copy_blocks(cache, torch.tensor([[first, last], [last, middle], [middle, first]]))
    assert torch.equal(cache[last], before[0])
    assert torch.equal(cache[middle], before[2])
    assert torch.equal(cache[first], before[1])

    swapped = torch.empty(3, *cache.shape[1:], dtype=cache.dtype, pin_memory=device.type == "cuda")
    ops.swap_blocks(cache, swapped, torch.tensor([[first, 0], [middle, 1], [last, 2]]))
    ops.swap_blocks(swapped, cache, torch.tensor([[0, middle], [1, last], [2, first]]))
    for i, source in enumerate((1, 2, 0)):  # what each of swapped's blocks was before the copy
        assert torch.equal(swapped[i].to(device), before[source])
    assert torch.equal(cache[middle], before[1])
    assert torch.equal(cache[last], before[2])
    assert torch.equal(cache[first], before[0])
    assert not any(cache[block].any() for block in neighbours)
