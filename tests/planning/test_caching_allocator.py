"""Segments as torch's allocator takes them."""

from __future__ import annotations

import random

import pytest
import torch

from pagedinfer.planning.caching_allocator import Block, CachingAllocator
from pagedinfer.runner.memory import MIB


@pytest.mark.parametrize(
    ("mebibytes", "segment"),
    [(0.001, 2), (1, 2), (1.001, 20), (9.9, 20), (10, 10), (10.1, 12), (125.25, 126)],
)
def test_a_tensor_takes_a_segment(mebibytes: float, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(int(mebibytes * MIB))
    assert allocator.reserved == segment * MIB


def test_the_smallest_free_block_is_taken_and_split() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB), allocator.allocate(30 * MIB))
    first, second = allocator.allocate(12 * MIB), allocator.allocate(18 * MIB)  # both where the smaller was
    assert (first.segment, second.segment) == (1, 1)
    allocator.allocate(64 * MIB)
    assert allocator.reserved == 94 * MIB


def test_neighbours_are_merged() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(parts[1], parts[3], parts[2])
    assert allocator.allocate(15 * MIB).segment == 0
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 36 * MIB


def test_small_tensors_stay_among_themselves() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved == 42 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_it_does_as_torch_does(seed: int) -> None:
    draw = random.Random(seed)
    allocator = CachingAllocator()
    held: list[tuple[Block, torch.Tensor]] = []
    before = torch.cuda.memory_reserved()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        for _ in range(300):
            if len(held) > 12 or (held and draw.random() < 0.4):
                block, _ = held.pop(draw.randrange(len(held)))
                allocator.free(block)
            else:
                size = int(2 ** draw.uniform(10, 27))
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                held.append((allocator.allocate(size), tensor))
            assert torch.cuda.memory_reserved() - before == allocator.reserved
