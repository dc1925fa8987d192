"""Strided and offset tensors: either the contiguous result or a clear error (vllm#28103, vllm#17091)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attention.batches import DTYPES, Batch, make_batch

QUERY_LENS = [1, 9, 4]
SEQ_LENS = [50, 9, 31]


@pytest.fixture(params=DTYPES, ids=str)
def batch(request: pytest.FixtureRequest, device: torch.device) -> Batch:
    return make_batch(QUERY_LENS, SEQ_LENS, device=device, dtype=request.param)


def assert_same(batch: Batch, **changes: Tensor) -> None:
    assert torch.equal(batch.with_options(**changes).run(), batch.run())


def test_query_split_from_fused_qkv(batch: Batch) -> None:
    num_tokens, num_heads, head_dim = batch.query.shape
    qkv = torch.randn(num_tokens, num_heads + 4, head_dim).to(batch.query)
    qkv[:, :num_heads] = batch.query
    query = (
        qkv.flatten(1)
        .split([num_heads * head_dim, 4 * head_dim], dim=1)[0]
        .unflatten(1, (num_heads, head_dim))
    )
    assert not query.is_contiguous()
    assert_same(batch, query=query)


def test_query_with_heads_first(batch: Batch) -> None:
    query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert query.stride(0) < query.stride(1)
    assert_same(batch, query=query)


def test_query_with_strided_head_dim_is_refused(batch: Batch) -> None:
    query = batch.query.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"query .* expected the last 1 dimension\(s\) contiguous"):
        batch.with_options(query=query).run()


def shifted(tensor: Tensor) -> Tensor:
    """A copy that begins one element behind an aligned address."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = memory[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("name", ["query", "kv_cache"])
def test_storage_offset_of_one_element(batch: Batch, name: str) -> None:
    changes = {name: shifted(getattr(batch, name))}
    if batch.query.is_cuda:
        with pytest.raises(ValueError, match=f"{name} .* multiples of 16 bytes"):
            batch.with_options(**changes).run()
    else:
        assert_same(batch, **changes)


def test_output_at_storage_offset_of_one_element(batch: Batch) -> None:
    from pagedinfer import ops

    out = shifted(torch.zeros_like(batch.query))
    if batch.query.is_cuda:
        with pytest.raises(ValueError, match=r"out .* multiples of 16 bytes"):
            ops.paged_attention(*batch.tensors, batch.plan(), scale=batch.scale, out=out)
    else:
        ops.paged_attention(*batch.tensors, batch.plan(), scale=batch.scale, out=out)
        assert torch.equal(out, batch.run())


def test_one_layer_of_a_cache_of_all_layers(batch: Batch) -> None:
    num_blocks, *rest = batch.kv_cache.shape
    whole = torch.full((num_blocks, 3, *rest), float("nan")).to(batch.kv_cache)
    whole[:, 1] = batch.kv_cache
    assert_same(batch, kv_cache=whole[:, 1])


def test_cache_with_heads_behind_slots_is_refused(batch: Batch) -> None:
    cache = batch.kv_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"kv_cache .* expected the last 4 dimension\(s\) contiguous"):
        batch.with_options(kv_cache=cache).run()


def test_block_table_cut_from_a_wider_one(batch: Batch) -> None:
    num_seqs, max_blocks = batch.block_table.shape
    wide = torch.full(
        (num_seqs, max_blocks + 7), 2**31 - 1, dtype=torch.int32, device=batch.block_table.device
    )
    wide[:, 3 : 3 + max_blocks] = batch.block_table
    assert_same(batch, block_table=wide[:, 3 : 3 + max_blocks])


def test_block_table_with_strided_columns_is_refused(batch: Batch) -> None:
    table = batch.block_table.T.contiguous().T
    with pytest.raises(ValueError, match=r"block_table .* expected the last 1 dimension\(s\) contiguous"):
        batch.with_options(block_table=table).run()
