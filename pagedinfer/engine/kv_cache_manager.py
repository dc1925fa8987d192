"""Which KV blocks each request holds: allocation, sharing through the prefix cache, release.

Invariants: a request's blocks hold its first `capacity` tokens in order; a block in more tables than one
is only ever written by its first owner, at positions that the others do not read.
"""

from __future__ import annotations

from pagedinfer._core import BlockPool
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler_config import SchedulerConfig

_NEVER = 1 << 62


class KVCacheManager:
    """Hands the blocks of the device's pool to requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self._caching = config.enable_prefix_caching

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those included that the prefix cache would lose by it."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    # ---- a request comes, grows and goes ----

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the leading full blocks of its tokens; at least one token is left over."""
        if not self._caching:
            return []
        num_full_blocks = (len(request.token_ids) - 1) // self.block_size
        return self.pool.match(request.token_ids, num_full_blocks, request.cache_salt)[0]

    def num_needed(self, prefix: list[int], num_tokens: int) -> int:
        """How many fewer blocks are free once a request of `num_tokens` that begins with `prefix` is in."""
        return self.blocks_for(num_tokens) - len(prefix) + self.pool.num_unreferenced(prefix)

    def admit(self, request: Request, prefix: list[int], num_tokens: int) -> None:
        """Gives `request`, which holds nothing, `prefix` and blocks for the rest of `num_tokens`."""
        self.pool.acquire(prefix)
        request.block_ids = prefix + self.pool.allocate(self.blocks_for(num_tokens) - len(prefix))
        request.capacity = len(request.block_ids) * self.block_size
        request.num_computed_tokens = len(prefix) * self.block_size
        request.next_cacheable = request.num_computed_tokens + self.block_size if self._caching else _NEVER

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Adds blocks until `num_tokens` fit; returns them. There must be as many free."""
        new_blocks = self.pool.allocate(self.blocks_for(num_tokens - request.capacity))
        request.block_ids += new_blocks
        request.capacity += len(new_blocks) * self.block_size
        return new_blocks

    def release(self, request: Request) -> None:
        """Takes back everything that `request` holds. Its full blocks stay known to the prefix cache."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.capacity = 0

    # ---- the prefix cache ----

    def cache_full_blocks(self, request: Request) -> None:
        """Makes its full blocks known whose tokens are all known and computed (or being computed).

        Call when `next_cacheable` is reached. A later request may then share them in the very step that
        computes them: within a layer, all keys and values are stored before any are read.
        """
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        first = request.next_cacheable // self.block_size - 1
        last = num_tokens // self.block_size
        if first < last:
            self.pool.insert(request.block_ids, first, last, request.token_ids, request.cache_salt)
            request.next_cacheable = (last + 1) * self.block_size

    def forget(self, request: Request) -> None:
        """Its blocks must not serve anybody else: what they hold is suspect."""
        self.pool.forget(request.block_ids)

    def reset_prefix_cache(self) -> None:
        """Forgets every known block. Requests that run keep theirs, and share none of them later."""
        self.pool.reset_cache()
