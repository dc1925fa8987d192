"""Attention over the paged KV cache, and what it needs to know of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from pagedinfer import ops
from pagedinfer.layers import few_rows
from pagedinfer.layers.norm import RMSNorm
from pagedinfer.layers.rotary import RotaryEmbedding

# A step of an urgent prompt waits for so many layers at most, a millisecond or less. A look takes 1 to 2 us.
_LAYERS_BETWEEN_LOOKS = 4
_LONGEST_HOLD = 20_000  # us; such a step takes some 6 ms of an 8B model


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
    newest_only: bool = False
    """Row i is the newest token of sequence i, of each one row, and no shared prefix is read apart."""
    hold: Tensor | None = None
    """int32 [1]: while it is not 0, the layers wait for a step that goes first."""


class PlansOnDemand(dict[int, ops.AttentionPlan]):
    """A step's plans, each made when a layer first asks for it: some need none."""

    def __init__(self, make: Callable[[int], ops.AttentionPlan]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, window: int) -> ops.AttentionPlan:
        plan = self[window] = self._make(window)
        return plan


class PagedAttention(nn.Module):
    """Attention over one layer of the cache. Has no weights.

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

    def give_way(self, batch: AttentionBatch) -> None:
        """Waits while a step is under way that goes first. Every so many layers, before they begin."""
        if batch.hold is not None and self.layer % _LAYERS_BETWEEN_LOOKS == 0:
            ops.hold_while(batch.hold, _LONGEST_HOLD)

    def attend(self, query: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> Tensor:
        """[num_tokens, num_heads * head_dim], over the one layer that `kv_cache` is."""
        output = ops.paged_attention(
            query,
            kv_cache,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            batch.plans[self.sliding_window],
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_cap=self.logit_cap,
        )
        return output.flatten(1)


class Attention(PagedAttention):
    """Stores a step's keys and values and attends over all of them."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """[num_tokens, num_heads * head_dim]

        Args:
            query: [num_tokens, num_heads, head_dim]; views of a fused projection are fine.
            key, value: [num_tokens, num_kv_heads, head_dim], likewise.
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
            batch: the step.
        """
        self.give_way(batch)
        cache = kv_cache[:, self.layer]
        ops.store_kv(key, value, cache, batch.slot_mapping)
        return self.attend(query, cache, batch)


class RotaryAttention(PagedAttention):
    """The same for heads that are rotated by their positions first, and before that perhaps normalized."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotary: RotaryEmbedding,
        kv_cache: Tensor,
        batch: AttentionBatch,
        *,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads * head_dim]

        Args:
            query, key, value, kv_cache, batch: as in `Attention`; query is changed in place.
            positions: int64 [num_tokens]
            rotary: has the table of angles.
            query_norm, key_norm: over head_dim, both or neither.
        """
        self.give_way(batch)
        cache = kv_cache[:, self.layer]
        if self._takes_one_launch(query, rotary, batch):
            output = ops.rotary_attention(
                positions,
                query,
                key,
                value,
                rotary.cos_sin_cache,
                cache,
                batch.slot_mapping,
                batch.block_table,
                batch.seq_lens,
                scale=self.scale,
                sliding_window=self.sliding_window,
                logit_cap=self.logit_cap,
                query_norm_weight=None if query_norm is None else query_norm.weight,
                key_norm_weight=None if key_norm is None else key_norm.weight,
                epsilon=1.0 if query_norm is None else query_norm.epsilon,
            )
            return output.flatten(1)
        ops.rotary_store_kv(
            positions,
            query,
            key,
            value,
            rotary.cos_sin_cache,
            cache,
            batch.slot_mapping,
            query_norm_weight=None if query_norm is None else query_norm.weight,
            key_norm_weight=None if key_norm is None else key_norm.weight,
            epsilon=1.0 if query_norm is None else query_norm.epsilon,
        )
        return self.attend(query, cache, batch)

    def _takes_one_launch(self, query: Tensor, rotary: RotaryEmbedding, batch: AttentionBatch) -> bool:
        """Whether `ops.rotary_attention` is made for this."""
        return (
            batch.newest_only
            and query.shape[0] <= few_rows.MAX_ATTENTION_ROWS
            and self.head_dim in ops.ROTARY_ATTENTION_HEAD_DIMS
            and self.head_dim == rotary.cos_sin_cache.shape[1]
            and self.num_heads <= ops.MAX_ROTARY_ATTENTION_GROUP * self.num_kv_heads
            and few_rows.have_kernels(query)
        )


def check_head_dim(head_dim: int) -> None:
    """Raises ValueError for a head_dim that no kernel was built for."""
    if head_dim not in ops.HEAD_DIMS:
        supported = ", ".join(map(str, ops.HEAD_DIMS))
        raise ValueError(f"head_dim {head_dim} is not supported; supported are {supported}")
