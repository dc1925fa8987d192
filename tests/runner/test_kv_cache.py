"""The KV cache: its shape, and the order in which a batch moves blocks."""

from __future__ import annotations

import pytest
import torch

from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest
from pagedinfer.runner.kv_cache import KVCache, KVCacheShape
from pagedinfer.sampling_params import SamplingParams

SHAPE = KVCacheShape(num_layers=3, num_kv_heads=2, block_size=8, head_dim=64, dtype=torch.float32)


def make_cache(device: torch.device) -> KVCache:
    cache = KVCache(SHAPE, num_blocks=5, num_cpu_blocks=4, device=device)
    for i in range(5):
        cache.blocks[i] = 10.0 + i
    for i in range(4):
        cache.cpu_blocks[i] = 20.0 + i
    return cache


def resumed(block_ids: list[int]) -> AdmittedRequest:
    return AdmittedRequest("a", 0, [1, 2], 1, block_ids, SamplingParams(), seed=0)


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


@pytest.mark.gpu
def test_steps_do_not_overtake_the_swaps_that_they_depend_on() -> None:
    """Blocks that are swapped out and given to the next step, or fetched back by it, many times over."""
    device = torch.device("cuda")
    shape = KVCacheShape(num_layers=8, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16)
    cache = KVCache(shape, num_blocks=256, num_cpu_blocks=128, device=device)
    ids = torch.arange(128, device=device, dtype=torch.bfloat16).view(-1, 1, 1, 1, 1, 1)
    out = [(block, block) for block in range(128)]
    back = [(block, 128 + block) for block in range(128)]
    for turn in range(8):
        cache.blocks[:128] = ids + turn
        cache.move(Batch(step=0, swaps_out=out))
        taken = list(range(64 * (turn % 2), 64 * (turn % 2) + 64))
        request = ScheduledRequest("a", 0, start=0, num_tokens=1, sample=True, new_block_ids=taken)
        cache.move(Batch(step=1, requests=[request]))
        cache.blocks[taken] = -1.0
        cache.move(Batch(step=2, swaps_in=back, admitted=[resumed(list(range(128, 256)))]))
        assert torch.equal(cache.blocks[128:], (ids + turn).expand_as(cache.blocks[128:]))
        cache.move(Batch(step=3, requests=[request], copies=[(255, block) for block in range(128)]))
        assert cache.swaps_in_done == 3
    torch.cuda.synchronize()
    timings = cache.take_swap_timings()
    assert len(timings) == 16
    assert all(seconds > 0 for _, seconds in timings)
    cache.close()


@pytest.mark.gpu
def test_the_directions_do_not_overtake_each_other() -> None:
    """Blocks that are fetched, given up and taken for something else before they have arrived."""
    shape = KVCacheShape(num_layers=8, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16)
    cache = KVCache(shape, num_blocks=1024, num_cpu_blocks=1536, device=torch.device("cuda"))
    for turn in range(4):
        cache.blocks[:512] = 1.0 + turn
        cache.move(Batch(step=0, swaps_out=[(i, i) for i in range(512)]))
        cache.move(Batch(step=1, swaps_in=[(i, 512 + i) for i in range(512)]))
        # What is arriving leaves for other CPU blocks, and those that it came from are written anew.
        given = ScheduledRequest("a", 0, 0, 1, sample=True, new_block_ids=list(range(512)))
        cache.move(Batch(step=2, swaps_out=[(512 + i, 512 + i) for i in range(512)], requests=[given]))
        cache.blocks[:512] = -1.0
        cache.move(Batch(step=3, swaps_out=[(i, i) for i in range(512)]))
        cache.move(Batch(step=4, swaps_in=[(512 + i, i) for i in range(512)]))
        assert cache.swaps_in_done < 4
        cache.move(Batch(step=5, admitted=[resumed(list(range(1024)))]))
        assert (cache.blocks == 1.0 + turn).all()
        assert cache.swaps_in_done == 5
        assert (cache.cpu_blocks[:512] == -1.0).all()
        assert (cache.cpu_blocks[512:1024] == 1.0 + turn).all()
    cache.close()


@pytest.mark.gpu
def test_a_swap_does_not_hold_up_a_step() -> None:
    """A gigabyte moves while a step that needs none of its blocks is over long before it."""
    shape = KVCacheShape(num_layers=8, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16)
    cache = KVCache(shape, num_blocks=2048, num_cpu_blocks=2048, device=torch.device("cuda"))
    for _ in range(2):  # the first time anything may be slow
        torch.cuda.synchronize()
        cache.take_swap_timings()
        cache.move(Batch(step=0, swaps_out=[(block, block) for block in range(2048)]))
        torch.cuda.current_stream().synchronize()
        out_is_under_way = sum(count for count, _ in cache.take_swap_timings()) < 2048
        torch.cuda.synchronize()
        assert cache.swaps_in_done == 0
        cache.take_swap_timings()
        cache.move(Batch(step=1, swaps_in=[(block, block) for block in range(2048)]))
        torch.cuda.current_stream().synchronize()
        in_is_under_way = cache.take_swap_timings() == []
        assert cache.swaps_in_done == 0
        torch.cuda.synchronize()
        assert cache.swaps_in_done == 1
        assert [count for count, _ in cache.take_swap_timings()] == [2048]
        cache.move(Batch(step=0))
    assert out_is_under_way
    assert in_is_under_way
    cache.close()
