"""rotary_attention against the two ops that it stands for, over poisoned caches and tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests.graph_capture import replay_captured

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MAX_POSITION = 4096


@pytest.fixture(
    params=[
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param(("cuda", torch.float16), marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu),
    ],
    ids=str,
)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A device and a dtype that it takes."""
    device, dtype = request.param
    return {"device": torch.device(device), "dtype": dtype}


@dataclass
class Step:
    """What a layer has when the newest tokens of some sequences come out of its projection."""

    positions: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    cos_sin_cache: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    options: dict[str, Any]

    def run(self) -> Tensor:
        return ops.rotary_attention(
            self.positions,
            self.query,
            self.key,
            self.value,
            self.cos_sin_cache,
            self.kv_cache,
            self.slot_mapping,
            self.block_table,
            self.seq_lens,
            **self.options,
        )

    def run_apart(self) -> Tensor:
        """By the two ops; changes nothing but the cache."""
        query = self.query.clone()
        names = ("query_norm_weight", "key_norm_weight", "epsilon")
        norms = {name: self.options[name] for name in names if name in self.options}
        rest = {name: value for name, value in self.options.items() if name not in norms}
        ops.rotary_store_kv(
            self.positions,
            query,
            self.key,
            self.value,
            self.cos_sin_cache,
            self.kv_cache,
            self.slot_mapping,
            **norms,
        )
        num_seqs, num_heads, head_dim = query.shape
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=query.device)
        plan = ops.attention_plan(
            starts,
            self.seq_lens,
            num_tokens=num_seqs,
            max_query_len=1,
            num_heads=num_heads,
            num_kv_heads=self.key.shape[1],
            head_dim=head_dim,
            block_size=self.kv_cache.shape[3],
            sliding_window=rest.get("sliding_window", 0),
        )
        return ops.paged_attention(
            query, self.kv_cache, self.block_table, starts, self.seq_lens, plan, **rest
        )


def make_step(
    lens: list[int],
    *,
    place: dict[str, Any],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    normed: bool = False,
    **options: Any,
) -> Step:
    """Slots that hold no earlier token are NaN; the tails of block tables are ids that do not exist."""
    device, dtype = place["device"], place["dtype"]
    counts = [-(-length // block_size) for length in lens]
    blocks = torch.randperm(sum(counts) + 2).int()
    cache = torch.full((sum(counts) + 2, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, **place)[:, 1]
    table = torch.full((len(lens), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
    slots = torch.full((len(lens),), -1)
    window = options.get("sliding_window", 0)
    for i, length in enumerate(lens):
        own, blocks = blocks[: counts[i]], blocks[counts[i] :]
        table[i, : counts[i]] = own
        for token in range(max(0, length - window) if window else 0, length):
            block, row = int(own[token // block_size]), token % block_size
            if token == length - 1:
                slots[i] = block * block_size + row
            else:
                cache[block, :, :, row] = torch.randn(2, num_kv_heads, head_dim, device=device).to(dtype)
        if window:  # blocks that are behind the window may be gone
            table[i, : max(0, length - window) // block_size] = 2**31 - 1
    qkv = torch.randn(len(lens), (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(dtype)
    parts = qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if normed:
        for name in ("query_norm_weight", "key_norm_weight"):
            options[name] = torch.randn(head_dim, device=device).to(dtype)
        options["epsilon"] = 1e-5
    return Step(
        torch.tensor([max(length - 1, 0) for length in lens], device=device),
        *parts,
        torch.randn(MAX_POSITION, head_dim, device=device),
        cache,
        slots.to(device),
        table.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        {"scale": head_dim**-0.5, **options},
    )


def check(step: Step) -> None:
    apart = replace(step, kv_cache=step.kv_cache.clone())
    wanted = apart.run_apart()
    found = step.run()
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(step.kv_cache, apart.kv_cache, rtol=tolerance, atol=tolerance, equal_nan=True)


LENGTHS = [[1], [2, 1], [16, 17, 15], [300, 0, 511, 512], [1500]]


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equals_the_two_ops(place: dict[str, Any], lens: list[int], head_dim: int) -> None:
    check(make_step(lens, place=place, head_dim=head_dim))


@pytest.mark.parametrize(
    "options",
    [
        {"normed": True},
        {"num_heads": 16, "num_kv_heads": 1},
        {"num_heads": 3, "num_kv_heads": 3},
        {"num_heads": 7, "num_kv_heads": 1, "normed": True},
        {"block_size": 8},
        {"block_size": 64, "head_dim": 64},
        {"sliding_window": 1},
        {"sliding_window": 100, "normed": True},
        {"logit_cap": 3.0},
        {"scale": -0.2},
    ],
    ids=str,
)
def test_options(place: dict[str, Any], options: dict[str, Any]) -> None:
    check(make_step([40, 5, 333], place=place, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[2500], [4000, 3, 1024, 600], [33] * 9], ids=str)
def test_more_tokens_than_the_rings_hold(lens: list[int]) -> None:
    gpu: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    for options in ({}, {"sliding_window": 2000}, {"head_dim": 64, "num_kv_heads": 1}):
        check(make_step(lens, place=gpu, **options))


def test_a_position_outside_the_table(place: dict[str, Any]) -> None:
    step = make_step([9], place=place)
    step.positions += MAX_POSITION
    if place["device"].type == "cpu":
        with pytest.raises(ValueError, match=r"positions\[0\] is 4104"):
            step.run()
    else:
        check(step)


def test_refuses_what_does_not_fit(place: dict[str, Any]) -> None:
    step = make_step([9, 3], place=place)
    with pytest.raises(ValueError, match="cos_sin_cache"):
        replace(step, cos_sin_cache=step.cos_sin_cache[:, :64].contiguous()).run()
    with pytest.raises(ValueError, match="seq_lens"):
        replace(step, seq_lens=step.seq_lens[:1]).run()
    with pytest.raises(ValueError, match="scale is inf"):
        replace(step, options={"scale": float("inf")}).run()
    with pytest.raises(ValueError, match="num_heads"):
        replace(step, query=step.query[:, :3]).run()
    if place["device"].type == "cpu":
        with pytest.raises(ValueError, match=r"slot_mapping\[1\] is -1; expected"):
            replace(step, slot_mapping=torch.tensor([int(step.slot_mapping[0]), -1])).run()
        with pytest.raises(ValueError, match=r"block_table\[0, 0\] is -5"):
            replace(step, block_table=step.block_table.clone().fill_(-5)).run()


@pytest.mark.gpu
def test_refuses_what_the_kernel_is_not_made_for() -> None:
    for dtype, options, message in (
        (torch.float32, {}, "query has dtype float32"),
        (torch.float16, {"head_dim": 80}, "head_dim is 80; expected 64 or 128"),
        (torch.float16, {"num_heads": 17, "num_kv_heads": 1}, "17 query heads share 1 KV heads"),
    ):
        step = make_step([9], place={"device": torch.device("cuda"), "dtype": dtype}, **options)
        with pytest.raises(ValueError, match=message):
            step.run()


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    step = make_step([40, 500], place={"device": torch.device("cuda"), "dtype": torch.bfloat16})
    step.options["out"] = torch.empty(2, 4, 128, device="cuda", dtype=torch.bfloat16)
    wanted = step.run().clone()
    step.options["out"].fill_(torch.nan)
    replay_captured(step.run)
    assert torch.equal(step.options["out"], wanted)


def test_opcheck(place: dict[str, Any]) -> None:
    step = make_step([9, 3], place=place)
    args = (step.positions, step.query, step.key, step.value, step.cos_sin_cache, step.kv_cache)
    more = (step.slot_mapping, step.block_table, step.seq_lens, torch.empty_like(step.query))
    torch.library.opcheck(
        torch.ops.pagedinfer.rotary_attention.default, (*args, *more, None, None, 1e-5, 0.1, 0, 0.0)
    )
