"""attention_plan: buffers that fit any lengths, results that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from pagedinfer import ops
from tests.attention.batches import DTYPES, Batch, assert_close, make_batch


def alone(batch: Batch, i: int) -> Batch:
    """The batch of its sequence i alone."""
    start, end = batch.query_start_loc[i : i + 2].tolist()
    return batch.with_options(
        query=batch.query[start:end],
        block_table=batch.block_table[i : i + 1],
        query_start_loc=batch.query_start_loc[[0, i + 1]].clamp(max=end - start),
        seq_lens=batch.seq_lens[i : i + 1],
    )


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_results_do_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype, window: int
) -> None:
    query_lens, seq_lens = [1, 40, 1, 1, 130, 1], [5000, 40, 3, 1500, 900, 512]
    batch = make_batch(query_lens, seq_lens, device=device, dtype=dtype, sliding_window=window)
    out = batch.run(batch.plan(deterministic=True))
    assert_close(out, batch.expected())
    for i, part in enumerate(out.split(query_lens)):
        single = alone(batch, i)
        assert torch.equal(single.run(single.plan(deterministic=True)), part), f"sequence {i}"


def test_cpu_results_do_not_depend_on_threads_or_batch() -> None:
    """Without being asked: chunks are merged in order, whoever computed them."""
    query_lens = [1, 1, 100, 2]
    batch = make_batch(query_lens, [6000, 800, 1300, 2600], device=torch.device("cpu"))
    threads = torch.get_num_threads()
    try:
        outs = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs.append(batch.run())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    for i, part in enumerate(outs[0].split(query_lens)):
        assert torch.equal(alone(batch, i).run(), part), f"sequence {i}"


def test_cpu_results_are_the_same_when_the_workspace_holds_no_partials() -> None:
    """A batch with more partial results than the workspace has room for keeps its chunks together."""
    options = {"device": torch.device("cpu"), "num_heads": 8, "num_kv_heads": 1, "head_dim": 256}
    long = make_batch([12], [6000], **options)
    alone_out = long.run()
    many = make_batch([12] * 8, [6000] * 8, **options)
    assert torch.equal(many.run()[:12], alone(many, 0).run())
    assert_close(alone_out, long.expected())


def test_buffers_serve_smaller_batches_of_any_lengths(device: torch.device) -> None:
    plan = ops.new_attention_plan(
        torch.zeros(9, dtype=torch.int32, device=device),
        num_tokens=64,
        max_query_len=30,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
    )
    for query_lens, seq_lens in (([1] * 8, [3000] * 8), ([30, 20, 1], [30, 2000, 9]), ([1], [1])):
        batch = make_batch(query_lens, seq_lens, device=device)
        padded = batch.with_options(
            query_start_loc=torch.nn.functional.pad(
                batch.query_start_loc, (0, 8 - len(seq_lens)), value=sum(query_lens)
            ),
            seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, 8 - len(seq_lens))),
            block_table=torch.nn.functional.pad(
                batch.block_table, (0, 0, 0, 8 - len(seq_lens)), value=2**31 - 1
            ),
        )
        assert padded.plan(out=plan) is plan
        assert_close(padded.run(plan), batch.expected())


def test_one_plan_serves_all_layers(device: torch.device) -> None:
    batch = make_batch([1, 20], [2500, 300], device=device)
    plan = batch.plan()
    for seed in range(3):
        layer = make_batch([1, 20], [2500, 300], device=device, seed=seed)
        layer = layer.with_options(query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens)
        assert_close(layer.run(plan), layer.expected())


@pytest.mark.parametrize("deterministic", [False, True])
def test_opcheck(device: torch.device, deterministic: bool) -> None:
    batch = make_batch([1, 3], [20, 3], device=device)
    plan = batch.plan()
    args = (batch.query_start_loc, batch.seq_lens, plan.plan, 4, 3, 4, 2, 64, 16, 0, deterministic)
    torch.library.opcheck(torch.ops.pagedinfer.attention_plan.default, args)


def plan_of(query_start_loc: list[int], seq_lens: list[int], device: torch.device, **changes: int) -> None:
    sizes = {"num_tokens": 8, "max_query_len": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    ops.attention_plan(
        torch.tensor(query_start_loc, dtype=torch.int32, device=device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        **{**sizes, "block_size": 16, **changes},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": -1}, "num_tokens is -1; expected >= 0"),
        ({"max_query_len": -1}, "max_query_len is -1; expected >= 0"),
        ({"sliding_window": -3}, "sliding_window is -3; expected >= 0"),
        ({"num_heads": 0}, "num_heads is 0 and num_kv_heads 2; expected"),
        ({"head_dim": 63}, "head_dim is 63; supported are 64, 80, 96, 112, 128, 256"),
        ({"block_size": 17}, "block_size is 17; supported are 8, 16, 32, 64"),
    ],
)
def test_sizes_out_of_range(device: torch.device, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of([0, 1, 3], [5, 9], device, **changes)


def test_shapes_that_do_not_fit(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"seq_lens has shape \[1\]; expected \[num_seqs=2\]"):
        plan_of([0, 1, 3], [5], device)
    with pytest.raises(ValueError, match=r"query_start_loc has shape \[0\]; expected \[num_seqs \+ 1\]"):
        plan_of([], [], device)


@pytest.mark.parametrize(
    ("query_start_loc", "seq_lens", "message"),
    [
        ([1, 2, 3], [5, 9], r"query_start_loc\[0\] is 1; expected 0"),
        ([0, 2, 1], [5, 9], r"query_start_loc\[1:3\] is \[2, 1\]; expected it to ascend"),
        ([0, 5, 6], [5, 9], "sequence 0 has 5 query tokens; expected at most max_query_len=4"),
        ([0, 4, 8, 9], [5, 9, 9], r"query_start_loc\[-1\] is 9; expected at most num_tokens=8"),
        ([0, 1, 2], [5, -1], r"seq_lens\[1\] is -1; expected >= 0"),
    ],
)
def test_lengths_that_do_not_fit(query_start_loc: list[int], seq_lens: list[int], message: str) -> None:
    """Contents, which only the CPU looks at."""
    with pytest.raises(ValueError, match=f"attention_plan: {message}"):
        plan_of(query_start_loc, seq_lens, torch.device("cpu"))
