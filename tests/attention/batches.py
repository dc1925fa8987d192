"""Random batches for the attention tests, poisoned wherever the op has no business to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagedinfer import ops
from tests import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNUSED_BLOCK_ID = 2**31 - 1

# Of the largest value of the right output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Batch:
    """The tensors of one `paged_attention` call and its options."""

    query: Tensor
    kv_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    sliding_window: int = 0
    logit_cap: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.kv_cache, self.block_table, self.query_start_loc, self.seq_lens

    def plan(self, *, deterministic: bool = False, out: ops.AttentionPlan | None = None) -> ops.AttentionPlan:
        query_lens = self.query_start_loc.diff()
        return ops.attention_plan(
            self.query_start_loc,
            self.seq_lens,
            num_tokens=self.query.shape[0],
            max_query_len=int(query_lens.max()) if len(query_lens) else 0,
            num_heads=self.query.shape[1],
            num_kv_heads=self.kv_cache.shape[2],
            head_dim=self.query.shape[2],
            block_size=self.kv_cache.shape[3],
            sliding_window=self.sliding_window,
            deterministic=deterministic,
            out=out,
        )

    def run(self, plan: ops.AttentionPlan | None = None) -> Tensor:
        """The op's output, into memory that held NaN."""
        out = torch.full(self.query.shape, float("nan"), dtype=self.query.dtype, device=self.query.device)
        return ops.paged_attention(
            *self.tensors,
            plan or self.plan(),
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_cap=self.logit_cap,
            out=out,
        )

    def expected(self) -> Tensor:
        return reference.paged_attention(
            *self.tensors,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_cap=self.logit_cap,
        )

    def check(self) -> Tensor:
        """Asserts that the op gives what the oracle gives; returns the op's output."""
        out = self.run()
        assert_close(out, self.expected())
        return out

    def with_options(self, **changes: object) -> Batch:
        return replace(self, **changes)  # type: ignore[arg-type]


def assert_close(out: Tensor, expected: Tensor) -> None:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=0, atol=TOLERANCE[out.dtype] * max(largest, 1e-3)
    )


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """Random queries and cache; block ids are shuffled.

    All that no query sees is poisoned: slots of the cache (NaN), whole blocks that belong to nobody (NaN),
    entries of the block table (an id far beyond the cache), `padding` rows behind the queries (NaN).
    """
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(blocks_of) + 2
    ids = torch.randperm(num_blocks, generator=generator)
    kv_cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), float("nan"))
    block_table = torch.full(
        (len(seq_lens), max(blocks_of, default=0) + 1), UNUSED_BLOCK_ID, dtype=torch.int32
    )
    taken = 0
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first_key = max(0, seq_len - query_len - sliding_window + 1) if sliding_window else 0
        for b in range(first_key // block_size, blocks_of[i]):
            block = int(ids[taken])
            taken += 1
            block_table[i, b] = block
            used = slice(max(0, first_key - b * block_size), min(block_size, seq_len - b * block_size))
            shape = kv_cache[block, :, :, used].shape
            kv_cache[block, :, :, used] = torch.randn(shape, generator=generator)

    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = sum(query_lens)
    query = torch.randn(num_tokens + padding, num_heads, head_dim, generator=generator)
    query[num_tokens:] = float("nan")
    return Batch(
        query=query.to(device, dtype),
        kv_cache=kv_cache.to(device, dtype),
        block_table=block_table.to(device),
        query_start_loc=query_start_loc.to(device),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32).to(device),
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        logit_cap=logit_cap,
    )
