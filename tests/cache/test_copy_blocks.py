"""copy_blocks against its oracle: chains, cycles, branches, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedinfer import ops
from tests import reference
from tests.graph_capture import replay_captured


def pairs(*mapping: tuple[int, int]) -> Tensor:
    return torch.tensor(mapping, dtype=torch.int64).view(-1, 2)


def check(kv_cache: Tensor, mapping: Tensor) -> None:
    expected = reference.copy_blocks(kv_cache, mapping)
    ops.copy_blocks(kv_cache, mapping)
    torch.testing.assert_close(kv_cache, expected, rtol=0, atol=0)


def numbered_blocks(num_blocks: int, device: torch.device, width: int = 6) -> Tensor:
    return torch.arange(num_blocks * width, dtype=torch.int32, device=device).view(num_blocks, width)


@st.composite
def mappings(draw: st.DrawFn) -> tuple[int, Tensor]:
    """(num_blocks, any valid mapping over them): sources at random, each destination at most once."""
    num_blocks = draw(st.integers(1, 20))
    ids = st.integers(0, num_blocks - 1)
    destinations = draw(st.lists(ids, unique=True))
    return num_blocks, pairs(*((draw(ids), destination) for destination in destinations))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=mappings())
def test_any_mapping_reads_before_it_writes(device: torch.device, case: tuple[int, Tensor]) -> None:
    num_blocks, mapping = case
    check(numbered_blocks(num_blocks, device), mapping)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(9)))
def test_any_permutation(device: torch.device, order: list[int]) -> None:
    check(numbered_blocks(9, device), pairs(*enumerate(order)))


@pytest.mark.parametrize(
    "mapping",
    [
        pytest.param(pairs(), id="empty"),
        pytest.param(pairs((2, 2)), id="self"),
        pytest.param(pairs((0, 1), (1, 2), (2, 3)), id="chain"),
        pytest.param(pairs((2, 3), (0, 1), (1, 2)), id="shuffled-chain"),
        pytest.param(pairs((0, 1), (1, 0)), id="exchange"),
        pytest.param(pairs((0, 1), (1, 2), (2, 0), (1, 5), (5, 6)), id="cycle-with-a-branch"),
        pytest.param(pairs((0, 1), (0, 2), (0, 3), (3, 4)), id="one-source-for-many"),
        pytest.param(pairs((0, 4), (1, 5), (2, 6), (3, 7)), id="neighbours"),
    ],
)
def test_named_cases(device: torch.device, mapping: Tensor) -> None:
    check(numbered_blocks(8, device), mapping)


def chain(length: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(length)]


def cycle(length: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % length) for i in range(length)]


def tree(size: int) -> list[tuple[int, int]]:
    return [((i - 1) // 3, i) for i in range(1, size)]


@pytest.mark.parametrize("length", [398, 399, 400, 401, 402, 799, 1200])
@pytest.mark.parametrize("shape", [chain, cycle, tree])
def test_more_copies_than_a_batch_takes(
    device: torch.device, shape: Callable[[int], list[tuple[int, int]]], length: int
) -> None:
    """A batch has 400 copies: longer sequences are split, and cycles are turned in parts."""
    mapping = shape(length)
    random.Random(length).shuffle(mapping)
    check(numbered_blocks(length + 1, device, width=1), pairs(*mapping))


def test_many_components_fill_several_batches(device: torch.device) -> None:
    mapping = []
    for first in range(0, 1500, 5):
        mapping += [(first, first + 1), (first + 1, first), (first, first + 2), (first + 2, first + 3)]
    random.Random(0).shuffle(mapping)
    check(numbered_blocks(1500, device, width=3), pairs(*mapping))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 2, 8, 64), (5, 7), (1,), (40_000,)], ids=str)
def test_every_dtype_and_block_size(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Blocks of 1 byte to several tiles, whether or not a vector of 16 bytes divides them."""
    kv_cache = torch.randint(0, 200, (6, *shape), device=device).to(dtype)
    check(kv_cache, pairs((0, 1), (1, 0), (2, 3), (0, 5), (3, 4)))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_takes_a_storage_offset(device: torch.device, offset: int) -> None:
    flat = torch.randint(0, 200, (5 * 4096 + offset,), device=device).to(torch.uint8)
    check(flat[offset:].view(5, 4096), pairs((0, 1), (1, 0), (2, 3)))


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    kv_cache = numbered_blocks(8, device)
    before = kv_cache.clone()
    with pytest.raises(ValueError, match=r"mapping\[1\] is \(3, 8\); expected a source in \[0, 8\)"):
        ops.copy_blocks(kv_cache, pairs((0, 1), (3, 8)))
    with pytest.raises(ValueError, match=r"mapping\[0\] is \(-1, 0\)"):
        ops.copy_blocks(kv_cache, pairs((-1, 0)))
    with pytest.raises(ValueError, match=r"mapping\[2\] is \(4, 1\) and mapping\[0\] is \(0, 1\)"):
        ops.copy_blocks(kv_cache, pairs((0, 1), (3, 2), (4, 1)))
    with pytest.raises(ValueError, match="mapping has dtype int32; expected int64"):
        ops.copy_blocks(kv_cache, pairs((0, 1)).int())
    with pytest.raises(ValueError, match=r"mapping has shape \[1, 3\]; expected \[n, 2\]"):
        ops.copy_blocks(kv_cache, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"mapping has .* strides .* expected contiguous"):
        ops.copy_blocks(kv_cache, pairs((0, 1), (2, 3)).T.contiguous().T)
    with pytest.raises(ValueError, match=r"kv_cache has .* strides .* expected contiguous"):
        ops.copy_blocks(kv_cache.T, pairs((0, 1)))
    assert torch.equal(kv_cache, before)


@pytest.mark.gpu
def test_refuses_a_mapping_on_the_gpu() -> None:
    with pytest.raises(ValueError, match="mapping is on cuda:0; expected cpu"):
        ops.copy_blocks(numbered_blocks(2, torch.device("cuda")), pairs((0, 1)).cuda())


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    """The graph keeps the ids: they are parameters of the launch, and the mapping may go."""
    kv_cache = numbered_blocks(500, torch.device("cuda"))
    mapping = pairs(*cycle(450))
    expected = reference.copy_blocks(kv_cache, mapping)
    replay_captured(lambda: ops.copy_blocks(kv_cache, mapping.clone()))
    assert torch.equal(kv_cache, expected)


def test_opcheck(device: torch.device) -> None:
    args = (numbered_blocks(8, device), pairs((0, 1), (1, 0), (2, 3)))
    torch.library.opcheck(torch.ops.pagedinfer.copy_blocks.default, args)
