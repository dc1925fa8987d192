"""Which KV blocks each request holds: allocation, sharing, copy on write, swap, release.

Invariants:
- A request's blocks hold its first `capacity` tokens in order.
- A block in more tables than one is written by its first owner only, at positions that the others do
  not read. A fork gets a copy of its last partial block when it is admitted, before it writes.
- Within a step the runner swaps out, swaps in, copies, and only then computes. What a later of these
  reads must not be handed out again while the step is being scheduled: it is pinned until `end_step`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagedinfer._core import BlockPool
from pagedinfer.engine.batch import Batch
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.engine.unsettled_blocks import UnsettledBlocks

_NEVER = 1 << 62


class Prefix(NamedTuple):
    """Leading full blocks of a request that need not be computed."""

    blocks: list[int]  # on the device
    cpu_blocks: list[int]  # behind them, in the second tier: to be brought back

    def __len__(self) -> int:
        return len(self.blocks) + len(self.cpu_blocks)


class KVCacheManager:
    """Hands the blocks of the device's pool and of the CPU's pool to requests."""

    def __init__(self, config: SchedulerConfig, last_step: int = 0) -> None:
        """last_step: the last one that was scheduled, on blocks that are all free now."""
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.cpu_pool = BlockPool(config.num_cpu_blocks, config.block_size)
        self._caching = config.enable_prefix_caching
        if self._caching and config.num_cpu_blocks:
            self.pool.set_lower_tier(self.cpu_pool)
        self.unsettled = UnsettledBlocks(last_step) if config.urgent_lane else None
        """Kept if there are steps that do not wait for those under way."""
        # Of the step that is being scheduled:
        self._swaps_out: list[tuple[int, int]] = []
        self._swaps_in: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._pinned: list[int] = []
        self._pinned_cpu: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those included that the prefix cache would lose by it."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def end_step(self, batch: Batch) -> None:
        """Gives the batch its swaps and copies; what they read may be handed out from now on."""
        if self._swaps_out or self._swaps_in or self._copies:
            batch.swaps_out += self._swaps_out
            batch.swaps_in += self._swaps_in
            batch.copies += self._copies
            self._swaps_out, self._swaps_in, self._copies = [], [], []
        demotions = self.pool.take_demotions()
        if demotions:
            batch.swaps_out += demotions
            # Sequences are evicted from their end; here too the end must be the first to go.
            self.cpu_pool.release([cpu_block for _, cpu_block in reversed(demotions)])
        if self._pinned:
            self._give_back(self._pinned)
            self._pinned = []
        if self._pinned_cpu:
            self.cpu_pool.release(self._pinned_cpu)
            self._pinned_cpu = []

    # ---- a request comes, grows and goes ----

    def find_prefix(self, request: Request) -> Prefix:
        """The known blocks that a waiting request begins with; at least one token is left over.

        An empty prefix without prefix caching, for a request that skips reading it, and for one that holds
        KV of its own: one that is swapped out, or a fork.
        """
        if not self._looks_up(request):
            return Prefix([], [])
        num_full_blocks = (len(request.token_ids) - 1) // self.block_size
        return Prefix(*self.pool.match(request.token_ids, num_full_blocks, request.cache_salt))

    def will_find(self, request: Request, prefix: Prefix, running: Request) -> bool:
        """Whether a running request is about to compute the block after a waiting one's `prefix`."""
        start = len(prefix.blocks) * self.block_size
        end = start + self.block_size
        return (
            self._looks_up(request)
            and not prefix.cpu_blocks
            and start <= running.num_computed_tokens < end
            and end <= min(len(running.token_ids), len(request.token_ids) - 1)
            and running.cache_salt == request.cache_salt
            and (start == 0 or running.block_ids[len(prefix) - 1] == prefix.blocks[-1])
            and running.token_ids[start:end] == request.token_ids[start:end]
        )

    def _looks_up(self, request: Request) -> bool:
        """Whether a waiting request may begin with known blocks."""
        holds_kv = request.block_ids or request.cpu_block_ids
        return self._caching and not holds_kv and not request.skip_reading_prefix_cache

    def num_needed(self, request: Request, prefix: Prefix, num_tokens: int) -> int:
        """How many fewer blocks are free once a waiting request is admitted with room for `num_tokens`.

        For a swapped one an upper bound: it may find blocks of its own still in the prefix cache.
        """
        total = self.blocks_for(num_tokens)
        if request.block_ids:
            return total - len(request.block_ids) + self._must_copy_tail(request)
        return total - len(prefix.blocks) + self.pool.num_unreferenced(prefix.blocks)

    def admit(self, request: Request, prefix: Prefix, num_tokens: int) -> int:
        """Gives a waiting request its KV (`prefix`, or what it holds) and room for `num_tokens` tokens.

        Afterwards its `num_computed_tokens` say where it goes on. `num_needed` blocks must be free.

        Returns:
            How many of its blocks are still to come from CPU blocks, with the swaps of this step. A swapped
            request keeps its CPU blocks until `end_swap_in`.
        """
        num_moving = len(self._swaps_in)
        if request.cpu_block_ids:
            request.block_ids = self._bring_back(request.cpu_block_ids)
        elif request.block_ids:
            self._copy_tail(request)
        else:
            self._take_prefix(request, prefix)
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            request.block_ids += self.pool.allocate(missing)
        request.capacity = len(request.block_ids) * self.block_size
        return len(self._swaps_in) - num_moving

    def _take_prefix(self, request: Request, prefix: Prefix) -> None:
        self.pool.acquire(prefix.blocks)
        request.block_ids = prefix.blocks.copy()
        request.num_shared_blocks = len(prefix.blocks)
        if prefix.cpu_blocks:
            self.cpu_pool.acquire(prefix.cpu_blocks)
            self._pinned_cpu += prefix.cpu_blocks
            request.block_ids += self._bring_back(prefix.cpu_blocks)
        request.num_computed_tokens = len(prefix) * self.block_size
        self._set_cacheable(request, request.num_computed_tokens)

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Adds blocks until `num_tokens` fit; returns them. There must be as many free."""
        new_blocks = self.pool.allocate(self.blocks_for(num_tokens - request.capacity))
        request.block_ids += new_blocks
        request.capacity += len(new_blocks) * self.block_size
        return new_blocks

    def release(self, request: Request) -> None:
        """Takes back everything that `request` holds. Its full blocks stay known to the prefix cache."""
        self._give_back(request.block_ids)
        self.cpu_pool.release(request.cpu_block_ids)
        request.block_ids = []
        request.cpu_block_ids = []
        request.capacity = request.num_shared_blocks = 0

    def _give_back(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        if self.unsettled is not None:
            self.unsettled.add(blocks)

    def admit_settled(self, request: Request, prefix: Prefix) -> bool:
        """Gives a waiting request that holds nothing `prefix` and room for all its tokens, as `admit`.

        But only what no step under way has to do with: a step that does not wait for them may use it.
        False, and the request holds nothing: there is not enough of that.
        """
        assert self.unsettled is not None
        if prefix.cpu_blocks or self.unsettled.any_of(prefix.blocks):
            return False
        self._take_prefix(request, prefix)
        fresh = self._allocate_settled(self.blocks_for(request.num_tokens) - len(prefix.blocks))
        if fresh is None:
            self.release(request)
            request.num_computed_tokens = 0
            return False
        request.block_ids += fresh
        request.capacity = len(request.block_ids) * self.block_size
        return True

    def _allocate_settled(self, num_blocks: int) -> list[int] | None:
        assert self.unsettled is not None
        unsettled = self.unsettled.all()
        if unsettled is None:
            return None
        free = [block for block in unsettled if self.pool.ref_count(block) == 0]
        if num_blocks > self.num_free - len(free):
            return None
        # The pool hands out those that hold nothing known first, and of the others what was given up first:
        # of the unsettled ones, only the former are in front of settled ones.
        in_front = sum(not self.pool.is_cached(block) for block in free)
        found = self.pool.allocate(num_blocks + in_front)
        settled = [block for block in found if block not in unsettled][:num_blocks]
        self.pool.release([block for block in found if block not in settled])
        assert len(settled) == num_blocks
        return settled

    # ---- swap ----

    def swap_out(self, request: Request) -> bool:
        """Moves a running request's KV to CPU blocks; False, and nothing is changed, if they are too few."""
        num_blocks = self.blocks_for(request.num_computed_tokens)
        moved = self.pool.transfer(request.block_ids[:num_blocks], self.cpu_pool)
        if moved is None:
            return False
        self.release(request)
        request.cpu_block_ids, copies = moved
        self._swaps_out += copies
        return True

    def end_swap_in(self, request: Request) -> None:
        """A request that was swapped out has its KV back: its CPU blocks are free after this step."""
        self._pinned_cpu += request.cpu_block_ids
        request.cpu_block_ids = []

    def cancel_swap_in(self, request: Request) -> None:
        """Takes the device blocks of a request back that has its KV in CPU blocks still."""
        self._give_back(request.block_ids)
        request.block_ids = []
        request.capacity = request.num_shared_blocks = 0

    def _bring_back(self, cpu_blocks: list[int]) -> list[int]:
        """Device blocks for what referenced CPU blocks hold."""
        moved = self.cpu_pool.transfer(cpu_blocks, self.pool)
        if moved is None:
            raise ValueError(f"{len(cpu_blocks)} blocks cannot come back: {self.num_free} are free")
        blocks, copies = moved
        self._swaps_in += copies
        if self.unsettled is not None:
            self.unsettled.add(blocks.copy())
        return blocks

    # ---- forks ----

    def fork(self, parent: Request, child: Request) -> None:
        """Lets `child`, which holds nothing, share the KV that it has in common with a running `parent`.

        All of it but the child's last token, which has to be computed for its logits.
        """
        num_tokens = min(parent.num_computed_tokens, child.num_tokens - 1)
        num_blocks = self.blocks_for(num_tokens)
        child.block_ids = parent.block_ids[:num_blocks]
        self.pool.acquire(child.block_ids)
        child.num_computed_tokens = num_tokens
        child.num_shared_blocks = num_blocks
        child.capacity = num_blocks * self.block_size
        self._set_cacheable(child, min(num_tokens, parent.next_cacheable - self.block_size))

    def _copy_tail(self, child: Request) -> None:
        """Gives a fork a last block of its own, if it needs one to go on."""
        if self._must_copy_tail(child):
            shared = child.block_ids[-1]
            (own,) = self.pool.allocate(1)
            self._copies.append((shared, own))
            self._pinned.append(shared)
            child.block_ids[-1] = own
            child.num_shared_blocks -= 1

    def _must_copy_tail(self, child: Request) -> bool:
        """Whether a fork's next token goes into a block that others read or that the cache knows."""
        if child.num_computed_tokens % self.block_size == 0:
            return False
        tail = child.block_ids[-1]
        # A copy of this step reads the block before anything is computed: its pin is no other reader.
        readers = self.pool.ref_count(tail) - self._pinned.count(tail)
        return readers > 1 or self.pool.is_cached(tail)

    # ---- the prefix cache ----

    def cache_full_blocks(self, request: Request) -> None:
        """Makes its full blocks known whose tokens are all known and computed (or being computed).

        Call when `next_cacheable` is reached. A later request may then share them in the very step that
        computes them: within a layer, all keys and values are stored before any are read.
        """
        # A swapped request has no capacity; what it completes meanwhile is made known when it is back.
        num_tokens = min(request.num_computed_tokens, len(request.token_ids), request.capacity)
        first = request.next_cacheable // self.block_size - 1
        last = num_tokens // self.block_size
        if first < last:
            self.pool.insert(request.block_ids, first, last, request.token_ids, request.cache_salt)
            if self.unsettled is not None:
                self.unsettled.add(request.block_ids[first:last])
            request.next_cacheable = (last + 1) * self.block_size

    def _set_cacheable(self, request: Request, num_known: int) -> None:
        """Full blocks within the first `num_known` tokens are known already."""
        full = num_known // self.block_size * self.block_size
        request.next_cacheable = full + self.block_size if self._caching else _NEVER
        request.quiet_until = 0

    def forget(self, request: Request) -> None:
        """Its blocks must not serve anybody else: what they hold is suspect."""
        self.pool.forget(request.block_ids)

    def reset_prefix_cache(self) -> None:
        """Forgets every known block. Requests that run keep theirs, and share none of them later."""
        self.pool.reset_cache()
        self.cpu_pool.reset_cache()
