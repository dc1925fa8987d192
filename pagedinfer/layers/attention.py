"""Attention over the paged KV cache, and what it needs to know of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from pagedinfer import ops


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's sequences, as the attention of every layer sees them."""

    slot_mapping: Tensor
    """int64 [num_tokens]: block id * block_size + offset of each token; -1 for padding."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]"""
    query_start_loc: Tensor
    """int32 [num_seqs + 1]: where each sequence's tokens of this step begin."""
    seq_lens: Tensor
    """int32 [num_seqs]: tokens of each sequence, this step's included; 0 for an unused row."""
    plans: Mapping[int, ops.AttentionPlan]
    """The step's plan for each sliding window that the model has; 0: no window."""


class Attention(nn.Module):
    """Stores a step's keys and values in one layer of the cache and attends over it. Has no weights.

    Raises:
        ValueError: a head_dim that no kernel was built for; the message lists those that are.
    """

    def __init__(
        self,
        layer: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        sliding_window: int = 0,
        logit_cap: float = 0.0,
    ) -> None:
        super().__init__()
        check_head_dim(head_dim)
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.logit_cap = logit_cap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """[num_tokens, num_heads * head_dim]

        Args:
            query: [num_tokens, num_heads, head_dim], rotated; views of a fused projection are fine.
            key, value: [num_tokens, num_kv_heads, head_dim], likewise.
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
            batch: the step.
        """
        cache = kv_cache[:, self.layer]
        ops.store_kv(key, value, cache, batch.slot_mapping)
        output = ops.paged_attention(
            query,
            cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            batch.plans[self.sliding_window],
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_cap=self.logit_cap,
        )
        return output.flatten(1)


def check_head_dim(head_dim: int) -> None:
    """Raises ValueError for a head_dim that no kernel was built for."""
    if head_dim not in ops.HEAD_DIMS:
        supported = ", ".join(map(str, ops.HEAD_DIMS))
        raise ValueError(f"head_dim {head_dim} is not supported; supported are {supported}")
