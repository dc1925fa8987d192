"""The KV cache: its shape, and the order in which a batch moves blocks."""

from __future__ import annotations

import pytest
import torch

from pagedinfer.engine.batch import Batch
from pagedinfer.runner.kv_cache import KVCache, KVCacheShape

SHAPE = KVCacheShape(num_layers=3, num_kv_heads=2, block_size=8, head_dim=64, dtype=torch.float32)


def make_cache(device: torch.device) -> KVCache:
    cache = KVCache(SHAPE, num_blocks=5, num_cpu_blocks=4, device=device)
    for i in range(5):
        cache.blocks[i] = 10.0 + i
    for i in range(4):
        cache.cpu_blocks[i] = 20.0 + i
    return cache


def contents(blocks: torch.Tensor) -> list[float]:
    flat = blocks.cpu().flatten(1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def test_shape(device: torch.device) -> None:
    cache = make_cache(device)
    assert list(cache.blocks.shape) == [5, 3, 2, 2, 8, 64]
    assert cache.blocks.device.type == device.type
    assert cache.cpu_blocks.is_pinned() == (device.type == "cuda")
    assert cache.blocks.nbytes == 5 * SHAPE.block_bytes


def test_no_cpu_blocks(device: torch.device) -> None:
    cache = KVCache(SHAPE, num_blocks=2, num_cpu_blocks=0, device=device)
    cache.move(Batch(step=0))
    assert cache.cpu_blocks.shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes(dtype: torch.dtype) -> None:
    shape = KVCacheShape(num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype=dtype)
    assert shape.block_bytes == 32 * 2 * 8 * 16 * 128 * dtype.itemsize


def test_swaps_out_come_before_swaps_in_and_copies(device: torch.device) -> None:
    """Block 1 goes out, its place is taken by what comes in, and that is copied on."""
    cache = make_cache(device)
    cache.move(Batch(step=0, swaps_out=[(1, 2)], swaps_in=[(0, 1)], copies=[(1, 3), (0, 4)]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    timings = cache.take_swap_timings()
    assert [num_blocks for num_blocks, _ in timings] == [1, 1]
    assert all(0 < seconds < 10 for _, seconds in timings)
    assert cache.take_swap_timings() == []
    assert contents(cache.blocks) == [10.0, 20.0, 12.0, 20.0, 10.0]
    assert contents(cache.cpu_blocks) == [20.0, 21.0, 11.0, 23.0]
