"""Decodes whose prefixes are shared: reading them once gives what reading them for each sequence gives."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests.attention.batches import DTYPES, Batch, assert_close, make_batch


@dataclass
class Shared:
    """A batch, and the groups in it."""

    batch: Batch
    prefixes: ops.SharedPrefixes

    def plan(self) -> ops.AttentionPlan:
        batch = self.batch
        return ops.attention_plan(
            batch.query_start_loc,
            batch.seq_lens,
            num_tokens=batch.query.shape[0],
            max_query_len=1,
            num_heads=batch.query.shape[1],
            num_kv_heads=batch.kv_cache.shape[2],
            head_dim=batch.query.shape[2],
            block_size=batch.kv_cache.shape[3],
            prefixes=self.prefixes,
        )

    def check(self) -> Tensor:
        out = self.batch.run(self.plan())
        assert_close(out, self.batch.expected())
        return out


def make_shared(
    groups: list[tuple[int, int]], own_lens: list[int], device: torch.device, **options: Any
) -> Shared:
    """Groups of (members, tokens shared), and how many tokens each sequence has beyond; some in no group.

    All members of a group read the blocks of its first; theirs in their place are poisoned.
    """
    starts, lens = [0], []
    shared = [0] * len(own_lens)
    for members, tokens in groups:
        first = starts[-1]
        shared[first : first + members] = [tokens] * members
        starts.append(first + members)
        lens.append(tokens)
    seq_lens = [a + b for a, b in zip(shared, own_lens, strict=True)]
    batch = make_batch([1] * len(seq_lens), seq_lens, device=device, **options)
    block_size = batch.kv_cache.shape[3]
    for start, end, tokens in zip(starts[:-1], starts[1:], lens, strict=True):
        for row in range(start + 1, end):
            own = batch.block_table[row, : tokens // block_size].long()
            batch.kv_cache[own] = float("nan")
            batch.block_table[row, : tokens // block_size] = batch.block_table[start, : tokens // block_size]
    as_int32 = {"dtype": torch.int32, "device": device}
    return Shared(batch, ops.SharedPrefixes(torch.tensor(starts, **as_int32), torch.tensor(lens, **as_int32)))


def dtypes_on(device: torch.device) -> list[torch.dtype]:
    return list(DTYPES) if device.type == "cpu" else [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("groups", "own_lens"),
    [
        ([(3, 128)], [1, 5, 64]),
        ([(2, 64), (1, 192), (0, 64), (4, 640)], [1, 70, 3, 1, 2, 3, 130, 9, 300]),  # two in none
        ([(2, 0), (3, 64)], [5, 0, 1, 2, 3, 0]),  # an unused group, and unused rows
        ([(40, 320)], [1 + i % 50 for i in range(40)]),
        ([], [4, 9]),
    ],
    ids=["one group", "several", "unused", "more rows than a tile", "no group at all"],
)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_equal_to_reading_them_for_each(
    groups: list[tuple[int, int]], own_lens: list[int], block_size: int, device: torch.device
) -> None:
    for dtype in dtypes_on(device):
        make_shared(groups, own_lens, device, block_size=block_size, dtype=dtype, padding=2).check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("num_heads", [2, 8, 14, 40])
def test_head_sizes_and_groups_of_heads(head_dim: int, num_heads: int, device: torch.device) -> None:
    """40 heads on two: a group larger than a slice of rows."""
    shared = make_shared(
        [(5, 256), (2, 128)],
        [1, 20, 70, 1, 9, 64, 65, 3],
        device,
        head_dim=head_dim,
        num_heads=num_heads,
        dtype=torch.bfloat16,
    )
    shared.check()
    shared.batch = shared.batch.with_options(logit_cap=5.0)
    shared.check()
    shared.batch = shared.batch.with_options(logit_cap=0.0, scale=-0.1)
    shared.check()


@pytest.mark.parametrize("seed", range(8))
def test_random_groups(seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    groups = [(draw.randint(1, 9), 64 * draw.randint(0, 6)) for _ in range(draw.randint(1, 5))]
    count = sum(members for members, _ in groups) + draw.randint(0, 4)
    own_lens = [draw.choice([1, 2, 63, 64, 65, 200]) for _ in range(count)]
    shared = make_shared(groups, own_lens, device, dtype=draw.choice(dtypes_on(device)), seed=seed)
    one = shared.check()
    plan = shared.plan()
    assert torch.equal(one, shared.batch.run(plan))
    assert torch.equal(one, shared.batch.run(plan))  # a plan serves many layers


@pytest.mark.gpu
def test_in_a_graph_whose_groups_change() -> None:
    """One graph, with room for four groups, replayed over other lengths and groups."""
    device = torch.device("cuda")
    first, second = (
        make_shared(groups, [5] * 8, device, dtype=torch.bfloat16, seed=members)
        for members, groups in enumerate(
            ([(3, 64), (2, 128), (0, 0), (0, 0)], [(0, 0), (2, 128), (2, 64), (1, 64)])
        )
    )
    out = torch.empty_like(first.batch.query)
    plans: list[ops.AttentionPlan] = []

    def step() -> None:
        plans.append(first.plan())
        ops.paged_attention(*first.batch.tensors, plans[-1], scale=first.batch.scale, out=out)

    def copy_second() -> None:
        for to, new in zip(first.batch.tensors, second.batch.tensors, strict=True):
            to.copy_(new)
        first.prefixes.start.copy_(second.prefixes.start)
        first.prefixes.lens.copy_(second.prefixes.lens)

    step()
    assert_close(out, first.batch.expected())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    copy_second()
    graph.replay()
    torch.cuda.synchronize()
    assert_close(out, second.batch.expected())


def refused(message: str, change: Any) -> None:
    shared = make_shared([(2, 64)], [5, 6, 7], torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        change(shared)


def test_what_the_cpu_refuses() -> None:
    def groups(start: list[int], lens: list[int]) -> Any:
        def change(shared: Shared) -> None:
            shared.prefixes = ops.SharedPrefixes(
                torch.tensor(start, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
            )
            shared.check()

        return change

    refused("prefix_start\\[0\\] is 1; expected 0", groups([1, 2], [64]))
    refused("is \\[0, 4\\]; expected it to ascend up to num_seqs=3", groups([0, 4], [64]))
    refused("is 32; expected a multiple of 64", groups([0, 2], [32]))
    refused("prefix_lens\\[0\\] is 128; expected less than seq_lens\\[0\\]=69", groups([0, 2], [128]))
    refused("prefix_start has shape \\[4\\]; expected \\[num_groups \\+ 1=2\\]", groups([0, 1, 1, 2], [64]))

    def other_blocks(shared: Shared) -> None:
        shared.batch.block_table[1, 0] = shared.batch.block_table[2, 0]
        shared.check()

    refused("block_table\\[1, 0\\] is .*, as in row 0 of the same shared prefix", other_blocks)

    def no_plan(shared: Shared) -> None:
        plan = shared.plan()
        shared.prefixes.lens[0] = 0
        shared.batch.run(plan)

    refused("plan was made for another batch", no_plan)

    def window(shared: Shared) -> None:
        shared.batch = shared.batch.with_options(sliding_window=8)
        shared.batch.run(shared.plan())

    refused("sliding_window is 8; a shared prefix cannot be read through a window", window)


@pytest.mark.gpu
def test_float32_on_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="shared prefixes in float32 are for the CPU"):
        make_shared([(2, 64)], [5, 6, 7], torch.device("cuda")).check()
