"""paged_attention against the float64 oracle: every dtype, size, option and boundary."""

from __future__ import annotations

import math

import pytest
import torch

from pagedinfer import ops
from tests.attention.batches import DTYPES, TOLERANCE, Batch, assert_close, make_batch

# Decode rows, a prefill, a chunk behind a context, an unused row.
QUERY_LENS = [1, 1, 7, 5, 0, 1]
SEQ_LENS = [1, 40, 7, 21, 0, 64]


@pytest.mark.parametrize("block_size", ops.BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", ops.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batch(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    make_batch(
        QUERY_LENS, SEQ_LENS, device=device, dtype=dtype, head_dim=head_dim, block_size=block_size
    ).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_query_heads_per_kv_head(
    device: torch.device, group: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    make_batch(
        QUERY_LENS,
        SEQ_LENS,
        device=device,
        dtype=dtype,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
    ).check()


def test_more_query_heads_than_a_tile_has_rows(device: torch.device) -> None:
    make_batch([1, 3], [30, 9], device=device, num_heads=130, num_kv_heads=1).check()


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_boundaries(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Around blocks of 8, around 64 and 512 keys at a time, around tiles of query rows."""
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025]
    options = {"device": device, "dtype": dtype, "head_dim": head_dim, "block_size": 8}
    make_batch([1] * len(lengths), lengths, **options).check()
    prefills = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65]
    make_batch(prefills, prefills, **options).check()
    make_batch([2, 3, 17, 48], [513, 64, 530, 1029], **options).check()


@pytest.mark.parametrize("query_len", [1, 3, 16, 70])
@pytest.mark.parametrize("window", [1, 2, 4, 15, 16, 17, 64, 100, 5000, 2**31, 2**63 - 1])
def test_sliding_window(device: torch.device, window: int, query_len: int) -> None:
    """The blocks before the window are gone: their table entries are poisoned."""
    lengths = [query_len + context for context in (0, 1, 15, 16, 63, 200, 600)]
    make_batch([query_len] * len(lengths), lengths, device=device, sliding_window=window).check()


@pytest.mark.parametrize("query_len", ["all", 1])
@pytest.mark.parametrize("length", range(3, 11))
def test_window_of_four_keys(device: torch.device, length: int, query_len: int | str) -> None:
    """transformers#39408, vllm#3385: one token too wide or too narrow. Against dense masked attention."""
    count = length if query_len == "all" else 1
    batch = make_batch([count], [length], device=device, block_size=8, num_heads=2)
    blocks = batch.block_table[0, : -(-length // 8)].long()
    key, value = batch.kv_cache[blocks].double().cpu().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    mask = torch.tensor([[p - 4 < t <= p for t in range(length)] for p in range(length - count, length)])
    assert mask.sum(1).max() == min(length, 4)
    query = batch.query.double().cpu().transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=batch.scale
    )
    out = batch.with_options(sliding_window=4).run()
    assert_close(out, expected.transpose(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_more_tiles_than_blocks(dtype: torch.dtype, head_dim: int, window: int) -> None:
    """Several tiles of rows one after another in a block, long and short, among them some that see no key;
    decodes beside them, few or so many that most multiprocessors are given to them."""
    device = torch.device("cuda")
    options = {"device": device, "dtype": dtype, "head_dim": head_dim, "num_heads": 64, "num_kv_heads": 16}
    chunks = [(n, n + before) for n, before in zip(range(9, 57, 2), [0, 70, 400] * 8, strict=True)]
    chunks += [(90, 8), (33, 300)]
    for decodes in ([40, 1000], [700] * 30):
        sequences = [*chunks, *((1, n) for n in decodes)]
        batch = make_batch(*zip(*sequences, strict=True), **options, sliding_window=window)  # type: ignore[arg-type]
        batch.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", [0.05, 1.0, 30.0, 1e4])
def test_logit_cap(device: torch.device, cap: float, dtype: torch.dtype) -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS, device=device, dtype=dtype, logit_cap=cap)
    out = batch.with_options(scale=1.0).check()
    if cap <= 1:
        uncapped = batch.with_options(scale=1.0, logit_cap=0.0).run()
        assert (out - uncapped).abs().max() > 0.1


def test_logit_cap_with_sliding_window(device: torch.device) -> None:
    make_batch([1, 20, 3], [90, 20, 300], device=device, sliding_window=33, logit_cap=2.0).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unused_rows_and_padding_are_zeros(device: torch.device, dtype: torch.dtype) -> None:
    """vllm#57158, flashinfer#363: garbage in unused slots, stale memory in rows of length zero."""
    batch = make_batch([1, 0, 1, 1], [5, 0, 16, 17], device=device, dtype=dtype, padding=5)
    out = batch.check()
    assert out.isfinite().all()
    assert (out[3:] == 0).all()


def test_queries_of_an_empty_sequence_are_zeros(device: torch.device) -> None:
    batch = make_batch([2, 3, 1], [2, 0, 40], device=device)
    out = batch.check()
    assert (out[2:5] == 0).all()


def test_queries_before_the_sequence_are_zeros(device: torch.device) -> None:
    """More queries than tokens: bottom-right causal puts the first ones before the first key."""
    out = make_batch([5, 1], [3, 9], device=device).check()
    assert (out[:2] == 0).all()
    assert (out[2:] != 0).any(-1).all()


@pytest.mark.parametrize(("num_seqs", "padding"), [(0, 0), (0, 3), (3, 0), (3, 4)])
def test_batch_without_queries(device: torch.device, num_seqs: int, padding: int) -> None:
    out = make_batch([0] * num_seqs, [0] * num_seqs, device=device, padding=padding).run()
    assert out.shape[0] == padding
    assert (out == 0).all()


@pytest.mark.parametrize("length", [1, 13_000, 33_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_very_negative_scores(device: torch.device, dtype: torch.dtype, length: int) -> None:
    """flashinfer#4267, vllm#905: scores near -1e6, where a finite mask value would win; long contexts.

    Every product and sum is an integer below 2**24, so that no order of summation rounds.
    """
    batch = make_batch([1], [length], device=device, dtype=dtype, num_heads=2, num_kv_heads=1)
    generator = torch.Generator().manual_seed(1)
    key = torch.zeros(batch.kv_cache[:, 0].shape)
    key[..., :32] = -(2.0**15)
    key[..., 32:40] = torch.randint(-2, 3, (*key.shape[:-1], 8), generator=generator).float()
    batch.kv_cache[:, 0] = key.to(device, dtype)
    batch.query[...] = 0
    batch.query[..., :40] = 1
    batch.with_options(scale=1.0).check()


@pytest.mark.parametrize("query_len", [1, 40])
def test_scores_of_mixed_magnitudes(device: torch.device, query_len: int) -> None:
    """One key far above the rest, wherever it stands, takes all the weight and leaves no NaN."""
    for where in (0, 100, 640, 699):
        batch = make_batch([query_len], [700], device=device)
        block, offset = int(batch.block_table[0, where // 16]), where % 16
        batch.query[...] = batch.query.abs() + 0.1
        batch.kv_cache[block, 0, :, offset] = 1000.0
        out = batch.check()
        if where <= 700 - query_len:
            expected = batch.kv_cache[block, 1, :, offset].repeat_interleave(2, dim=0)
            assert (out - expected).abs().max() < 1e-6


@pytest.mark.parametrize("rise", [-3.0, 0.7, 3.0, 7.9, 40.0])
@pytest.mark.parametrize("level", [0.0, -60.0])
@pytest.mark.parametrize("query_len", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_that_rise_from_tile_to_tile(
    device: torch.device, dtype: torch.dtype, query_len: int, level: float, rise: float
) -> None:
    """Towards the first keys, which are walked last, by so many powers of two in 128 keys: a maximum may
    be kept for a while, but not for long. From zero, and from where all scores are below it."""
    length = 1200
    batch = make_batch([query_len], [length], device=device, dtype=dtype, num_heads=8, num_kv_heads=2)
    token = torch.arange(length, device=device)
    block = batch.block_table[0, token // 16].long()
    score = level + (length - token) / 128 * rise * math.log(2)
    batch.kv_cache[block, 0, :, token % 16, 0] = score[:, None].to(dtype)
    batch.query[..., 1:] *= 0.1
    batch.query[..., 0] = 1
    batch.with_options(scale=1.0).check()


@pytest.mark.parametrize("lengths", [[4000], [3000, 1, 700, 2049], [5000, 5001]])
@pytest.mark.parametrize("query_len", [1, 2, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_contexts_split_along_the_keys(
    device: torch.device, dtype: torch.dtype, query_len: int, lengths: list[int]
) -> None:
    query_lens = [min(query_len, n) for n in lengths]
    make_batch(query_lens, lengths, device=device, dtype=dtype).check()


def test_nan_in_a_query_stays_in_its_row(device: torch.device) -> None:
    batch = make_batch([1, 6], [70, 80], device=device)
    clean = batch.run()
    batch.query[3, 1, 5] = float("nan")
    out = batch.run()
    assert out[3, 1].isnan().all()
    out[3, 1] = clean[3, 1]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_no_worse_than_sdpa(device: torch.device, dtype: torch.dtype) -> None:
    """On the same inputs, contiguous for SDPA. Both are compared with float64."""
    for query_len, length in ((1, 700), (96, 96)):
        batch = make_batch([query_len], [length], device=device, dtype=dtype)
        blocks = batch.block_table[0, : -(-length // 16)].long()
        kv = batch.kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        key, value = kv.repeat_interleave(2, dim=1)
        sdpa = torch.nn.functional.scaled_dot_product_attention(
            batch.query.transpose(0, 1)[None], key[None], value[None], is_causal=query_len > 1
        )[0].transpose(0, 1)
        expected = batch.expected()
        errors = [(x.double().cpu() - expected).abs().max().item() for x in (batch.run(), sdpa)]
        # Both round; a quarter is the scatter of the largest of many roundings. Float32's are tiny.
        assert errors[0] <= 1.25 * errors[1] + 2e-6


def test_all_weights_equal(device: torch.device) -> None:
    """Queries of zero: every output is the mean of the values seen."""
    batch = make_batch([1, 50], [1000, 50], device=device, num_heads=2, num_kv_heads=2)
    batch.query.zero_()
    out = batch.check().double().cpu()
    blocks = batch.block_table[1, :4].long()
    value = batch.kv_cache[blocks, 1].double().cpu().permute(1, 0, 2, 3).flatten(1, 2)
    for j in range(50):
        assert (out[1 + j] - value[:, : j + 1].mean(1)).abs().max() < TOLERANCE[torch.float32]


def test_out_argument_and_fresh_output(device: torch.device) -> None:
    batch: Batch = make_batch(QUERY_LENS, SEQ_LENS, device=device)
    fresh = ops.paged_attention(*batch.tensors, batch.plan(), scale=batch.scale)
    assert_close(fresh, batch.expected())
    assert torch.equal(fresh, batch.run())
