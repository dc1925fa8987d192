"""How a model's dimensions are divided among the ranks of a group. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_VOCABULARY_MULTIPLE = 8  # rows of logits begin at multiples of 16 bytes, which GEMMs and the sampler like


class Ranks(Protocol):
    """What a division depends on: see `Group`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a dimension of `total` elements: [start, stop)."""

    total: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements the rank has."""
        return self.stop - self.start

    def times(self, width: int) -> Shard:
        """The same part where each element is `width` elements wide."""
        return Shard(self.total * width, self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True)
class HeadShards:
    """A rank's attention heads."""

    query: Shard
    kv: Shard

    def widths(self, head_dim: int) -> tuple[Shard, Shard, Shard]:
        """Its parts of the outputs of the projections to query, key and value."""
        kv = self.kv.times(head_dim)
        return self.query.times(head_dim), kv, kv


def shard_evenly(total: int, ranks: Ranks) -> Shard:
    """The same number of elements for each rank.

    Raises:
        ValueError: `total` is not a multiple of the number of ranks.
    """
    if total % ranks.size:
        raise ValueError(f"{total} cannot be divided evenly among {ranks.size} ranks")
    size = total // ranks.size
    return Shard(total, ranks.rank * size, (ranks.rank + 1) * size)


def shard_heads(num_heads: int, num_kv_heads: int, ranks: Ranks) -> HeadShards:
    """Query heads evenly; KV heads evenly too, or each on several ranks where they are fewer than these.

    A rank's query heads and the KV heads that they read are always on the same rank.

    Raises:
        ValueError: these numbers of heads cannot be divided so; see `fits_heads`.
    """
    if not fits_heads(num_heads, num_kv_heads, ranks.size):
        raise ValueError(
            f"{num_heads} attention heads on {num_kv_heads} KV heads cannot be divided among "
            f"{ranks.size} ranks"
        )
    query = shard_evenly(num_heads, ranks)
    if num_kv_heads >= ranks.size:
        return HeadShards(query, shard_evenly(num_kv_heads, ranks))
    head = ranks.rank * num_kv_heads // ranks.size
    return HeadShards(query, Shard(num_kv_heads, head, head + 1))


def fits_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    """Whether `shard_heads` can divide them."""
    return num_heads % num_ranks == 0 and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)


def shard_vocabulary(vocab_size: int, ranks: Ranks) -> tuple[Shard, int]:
    """A rank's tokens, and how many rows each rank has for them; the rows beyond its tokens are padding.

    The rows of all ranks, side by side, begin with the vocabulary in its order. One rank has no padding.
    """
    if ranks.size == 1:
        return Shard(vocab_size, 0, vocab_size), vocab_size
    rows = -(-vocab_size // ranks.size)
    rows = -(-rows // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    start = min(vocab_size, ranks.rank * rows)
    return Shard(vocab_size, start, min(vocab_size, start + rows)), rows
