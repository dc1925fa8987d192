"""Caches of more elements than 32 bits count, and what only a GPU does: graphs, many splits."""

from __future__ import annotations

import pytest
import torch

from tests.attention.batches import DTYPES, Batch, assert_close, make_batch


def with_blocks_far_apart(batch: Batch, elements: int) -> Batch:
    """The same batch in a cache of more than `elements`, its blocks spread from the first to the last."""
    used = batch.block_table[batch.block_table < 2**31 - 1].long()
    num_blocks = elements // batch.kv_cache[0].numel() + 2
    # Memory of the blocks that nobody uses is never touched, so that it costs no more than addresses.
    cache = torch.empty(num_blocks, *batch.kv_cache.shape[1:], dtype=batch.kv_cache.dtype, device=used.device)
    places = torch.linspace(0, num_blocks - 1, len(used)).long().to(used.device)
    new_id = torch.zeros(len(batch.kv_cache), dtype=torch.int32, device=used.device)
    new_id[used] = places.int()
    cache[places] = batch.kv_cache[used]
    table = torch.where(
        batch.block_table < 2**31 - 1,
        new_id[batch.block_table.clamp(max=len(batch.kv_cache) - 1).long()],
        batch.block_table,
    )
    return batch.with_options(kv_cache=cache, block_table=table)


@pytest.mark.parametrize(
    "exponent", [31, pytest.param(32, marks=pytest.mark.gpu), pytest.param(33, marks=pytest.mark.gpu)]
)
def test_cache_beyond_32_bits(device: torch.device, exponent: int) -> None:
    """vllm#1486, flashinfer#3136: offsets that overflowed, in the first, a middle and the last block."""
    if exponent > 31 and device.type == "cpu":
        pytest.skip("the CPU needs only the first of these")
    batch = make_batch(
        [1, 20, 1],
        [700, 40, 33],
        device=device,
        dtype=torch.bfloat16,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    )
    expected = batch.run()
    try:
        far = with_blocks_far_apart(batch, 2**exponent)
    except (RuntimeError, torch.OutOfMemoryError):
        pytest.skip(f"no memory for 2^{exponent} elements")
    assert far.kv_cache.numel() > 2**exponent
    assert int(far.block_table[far.block_table < 2**31 - 1].max()) == len(far.kv_cache) - 1
    assert torch.equal(far.run(), expected)
    assert_close(expected, batch.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[100_000], [50_000] + [1] * 63, [4096] * 7, list(range(1, 4000, 31))])
def test_splits_along_the_keys_on_a_whole_gpu(lengths: list[int], dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for num_kv_heads in (1, 8):
        make_batch(
            [1] * len(lengths),
            lengths,
            device=device,
            dtype=dtype,
            num_heads=8,
            num_kv_heads=num_kv_heads,
        ).check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 256)],
)
def test_so_many_units_that_they_are_dealt_whole(dtype: torch.dtype, head_dim: int) -> None:
    """Short ones and some longer, unsorted; again with the same plan; alone, in deterministic mode."""
    device = torch.device("cuda")
    count = 9 * torch.cuda.get_device_properties(device).multi_processor_count
    lengths = [300 if i % 20 == 7 else i % 16 + 1 for i in range(count)]
    options = {"device": device, "dtype": dtype, "num_heads": 8, "num_kv_heads": 8, "head_dim": head_dim}
    batch = make_batch([1] * count, lengths, **options, padding=3)  # type: ignore[arg-type]
    plan = batch.plan()
    out = batch.check()
    for _ in range(2):
        assert torch.equal(batch.run(plan), out)
    plan = batch.plan(deterministic=True)
    out = batch.run(plan)
    assert torch.equal(batch.run(plan), out)
    for i in (0, 7, count - 1):
        alone = batch.with_options(
            query=batch.query[i : i + 1],
            block_table=batch.block_table[i : i + 1],
            query_start_loc=batch.query_start_loc[:2],
            seq_lens=batch.seq_lens[i : i + 1],
        )
        assert torch.equal(alone.run(alone.plan(deterministic=True))[0], out[i])


@pytest.mark.gpu
@pytest.mark.parametrize("max_query_len", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_graph_follows_new_lengths(dtype: torch.dtype, max_query_len: int) -> None:
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(3)
    num_seqs, longest = 12, 3000

    def random_batch(seed: int) -> Batch:
        query_lens = torch.randint(0, max_query_len + 1, (num_seqs,), generator=generator)
        context = torch.randint(0, longest - max_query_len, (num_seqs,), generator=generator)
        seq_lens = torch.where(query_lens > 0, query_lens + context, 0)
        batch = make_batch(
            query_lens.tolist(),
            seq_lens.tolist(),
            device=device,
            dtype=dtype,
            padding=num_seqs * max_query_len - int(query_lens.sum()),
            seed=seed,
        )
        # All batches in tensors of one shape.
        table = torch.full((num_seqs, longest // 16 + 2), 2**31 - 1, dtype=torch.int32, device=device)
        table[:, : batch.block_table.shape[1]] = batch.block_table
        cache = torch.full(
            (num_seqs * (longest // 16 + 1), 2, 2, 16, 64), float("nan"), dtype=dtype, device=device
        )
        cache[: len(batch.kv_cache)] = batch.kv_cache
        return batch.with_options(block_table=table, kv_cache=cache)

    static = random_batch(0)
    from pagedinfer import ops

    options = {
        "num_tokens": num_seqs * max_query_len,
        "max_query_len": max_query_len,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 16,
    }
    plan = ops.new_attention_plan(static.query_start_loc, **options)
    out = torch.empty_like(static.query)

    def step() -> None:
        ops.attention_plan(static.query_start_loc, static.seq_lens, out=plan, **options)
        ops.paged_attention(*static.tensors, plan, scale=static.scale, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(1, 6):
        batch = random_batch(seed)
        for ours, new in zip(static.tensors, batch.tensors, strict=True):
            ours.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, batch.expected())
