"""KVCacheManager: what a step still has to read is not handed out while the step is being planned."""

from __future__ import annotations

from typing import Any

import pytest

from pagedinfer.engine.batch import Batch
from pagedinfer.engine.kv_cache_manager import KVCacheManager
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import SchedulerConfig
from tests.engine.rig import make_request, prompt_of


def make_manager(**config: Any) -> KVCacheManager:
    defaults = {"block_size": 4, "num_blocks": 8, "num_cpu_blocks": 4, "max_model_len": 64}
    return KVCacheManager(SchedulerConfig(**(defaults | config)))


def computed(manager: KVCacheManager, name: str, prompt: list[int]) -> Request:
    """A request whose prompt is in the cache."""
    request = make_request(name, prompt)
    manager.admit(request, manager.find_prefix(request), len(prompt))
    request.num_computed_tokens = len(prompt)
    manager.cache_full_blocks(request)
    manager.end_step(Batch(0))
    return request


def test_the_source_of_a_copy_is_not_handed_out_in_its_step() -> None:
    manager = make_manager()
    parent = computed(manager, "parent", prompt_of(8))
    child = make_request("child", prompt_of(8))
    manager.fork(parent, child)
    source = child.block_ids[-1]
    manager.release(parent)  # the child is now the only one to hold a block that the cache knows
    manager.admit(child, manager.find_prefix(child), 8)
    assert source not in manager.pool.allocate(manager.num_free)
    batch = Batch(1)
    manager.end_step(batch)
    assert batch.copies == [(source, child.block_ids[-1])]
    assert manager.pool.allocate(1) == [source]


def test_cpu_blocks_on_their_way_back_are_not_written_in_that_step() -> None:
    manager = make_manager(num_blocks=3, num_cpu_blocks=2)
    request = computed(manager, "a", prompt_of(8))
    assert manager.swap_out(request)
    batch = Batch(1)
    manager.end_step(batch)
    assert [to for _, to in batch.swaps_out] == request.cpu_block_ids
    cpu_blocks = request.cpu_block_ids
    manager.reset_prefix_cache()  # so that it has to come back by a copy
    manager.admit(request, manager.find_prefix(request), 9)
    assert manager.cpu_pool.num_free == 0
    batch = Batch(2)
    manager.end_step(batch)
    assert [source for source, _ in batch.swaps_in] == cpu_blocks
    assert manager.cpu_pool.num_free == 0  # until it has its KV back
    manager.end_swap_in(request)
    assert manager.cpu_pool.num_free == 0
    manager.end_step(Batch(3))
    assert manager.cpu_pool.num_free == 2
    assert len(request.block_ids) == 3
    assert request.num_computed_tokens == 8


def test_swap_out_takes_all_or_nothing() -> None:
    manager = make_manager(num_cpu_blocks=1)
    request = computed(manager, "a", prompt_of(8))
    blocks = request.block_ids.copy()
    assert not manager.swap_out(request)
    assert request.block_ids == blocks
    assert request.cpu_block_ids == []
    assert manager.cpu_pool.num_free == 1


def test_bringing_back_needs_room() -> None:
    manager = make_manager(num_blocks=4)
    request = computed(manager, "a", prompt_of(8))
    assert manager.swap_out(request)
    manager.reset_prefix_cache()
    manager.pool.allocate(3)
    with pytest.raises(ValueError, match="2 blocks cannot come back: 1 are free"):
        manager.admit(request, manager.find_prefix(request), 8)


def test_a_fork_takes_the_last_block_as_it_is_if_nobody_else_reads_it() -> None:
    manager = make_manager(enable_prefix_caching=False)
    parent = computed(manager, "parent", prompt_of(7))
    children = [make_request(f"c{i}", prompt_of(7)) for i in range(2)]
    for child in children:
        manager.fork(parent, child)
    manager.release(parent)
    shared = children[0].block_ids.copy()
    for child in children:
        assert manager.num_needed(child, manager.find_prefix(child), 7) == (child is children[0])
        manager.admit(child, manager.find_prefix(child), 7)
    batch = Batch(1)
    manager.end_step(batch)
    assert batch.copies == [(shared[1], children[0].block_ids[1])]
    assert children[1].block_ids == shared
