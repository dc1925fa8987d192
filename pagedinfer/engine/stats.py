"""What the scheduler has done and how it stands: counters and gauges, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from pagedinfer.engine.batch import Batch
from pagedinfer.engine.decisions import WaitingReason
from pagedinfer.engine.request import Request

if TYPE_CHECKING:
    from pagedinfer.engine.scheduler import Scheduler

__all__ = ["SchedulerCounters", "SchedulerStats", "WaitingReason", "collect_stats"]


@dataclass(slots=True)
class SchedulerCounters:
    """Sums since the scheduler was made; they only grow."""

    num_steps: int = 0  # that had something to run
    num_scheduled_tokens: int = 0  # computed, recomputations included
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0  # of requests when first admitted
    num_preemptions_swap: int = 0
    num_preemptions_recompute: int = 0
    num_displaced: int = 0  # of these preemptions, those for a more urgent request
    num_stalls: int = 0  # steps in which the least urgent request had to wait for a block
    prefix_cache_queries: int = 0  # tokens looked up, at first admission
    prefix_cache_hits: int = 0  # tokens found, in either tier
    cpu_prefix_cache_hits: int = 0  # of these, tokens found in CPU blocks
    num_blocks_swapped_out: int = 0  # evictions to the second tier included
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0  # copy on write
    limited_steps: dict[str, int] = field(  # after which a request waited, by what the first lacked
        default_factory=lambda: dict.fromkeys(get_args(WaitingReason), 0)
    )
    num_finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )

    @property
    def num_preemptions(self) -> int:
        return self.num_preemptions_swap + self.num_preemptions_recompute

    def count_batch(self, batch: Batch, num_tokens: int) -> None:
        """A step of `num_tokens` tokens was planned."""
        self.num_steps += not batch.is_empty()
        self.num_scheduled_tokens += num_tokens
        self.num_blocks_swapped_out += len(batch.swaps_out)
        self.num_blocks_swapped_in += len(batch.swaps_in)
        self.num_blocks_copied += len(batch.copies)

    def count_admission(self, request: Request, num_cpu_hits: int) -> None:
        """A request is admitted for the first time, `num_cpu_hits` of its cached tokens from the CPU."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.prefix_cache_queries += request.num_tokens
        self.prefix_cache_hits += request.num_cached_tokens
        self.cpu_prefix_cache_hits += num_cpu_hits


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """How things stand between two steps."""

    num_running: int
    num_waiting: int  # those included that wait for the prompt of a request they fork from
    num_swapped: int
    waiting_reason: WaitingReason | None  # why the first waiting request was not admitted last time
    num_blocks: int
    num_used_blocks: int  # referenced by a request
    num_cached_blocks: int  # known to the prefix cache, referenced or not
    num_cpu_blocks: int
    num_used_cpu_blocks: int  # held by swapped requests
    num_cached_cpu_blocks: int
    num_allocated_kv_tokens: int  # room in the used blocks
    num_used_kv_tokens: int  # of that, what holds a token's KV
    num_reserved_kv_tokens: int  # what reserving max_tokens for every running request would have held
    expected_output_tokens: float  # that a new request is expected to generate
    counters: SchedulerCounters

    @property
    def kv_cache_usage(self) -> float:
        """Share of the device's blocks that requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks

    @property
    def cpu_cache_usage(self) -> float:
        """Share of the CPU's blocks that swapped requests hold, 0 to 1."""
        return self.num_used_cpu_blocks / self.num_cpu_blocks if self.num_cpu_blocks else 0.0

    @property
    def kv_utilization(self) -> float:
        """Share of the allocated KV memory that holds real tokens; 1 when nothing is allocated."""
        if not self.num_allocated_kv_tokens:
            return 1.0
        return self.num_used_kv_tokens / self.num_allocated_kv_tokens

    @property
    def prefix_cache_hit_rate(self) -> float:
        queries = self.counters.prefix_cache_queries
        return self.counters.prefix_cache_hits / queries if queries else 0.0


def collect_stats(scheduler: Scheduler) -> SchedulerStats:
    """How `scheduler` stands."""
    kv = scheduler.kv
    running = list(scheduler.running)
    num_swapped = scheduler.preemption.num_swapped
    num_used_blocks = kv.pool.num_blocks - kv.pool.num_free
    num_allocated = num_used_blocks * kv.block_size
    # Blocks are shared when full; what is empty is at the end of each request's own last blocks.
    num_empty = sum(request.capacity - request.num_computed_tokens for request in running)
    return SchedulerStats(
        num_running=len(running),
        num_waiting=len(scheduler.waiting) + len(scheduler.forks) - num_swapped,
        num_swapped=num_swapped,
        waiting_reason=scheduler.waiting_reason,
        num_blocks=kv.pool.num_blocks,
        num_used_blocks=num_used_blocks,
        num_cached_blocks=kv.pool.num_cached,
        num_cpu_blocks=kv.cpu_pool.num_blocks,
        num_used_cpu_blocks=kv.cpu_pool.num_blocks - kv.cpu_pool.num_free,
        num_cached_cpu_blocks=kv.cpu_pool.num_cached,
        num_allocated_kv_tokens=num_allocated,
        num_used_kv_tokens=max(0, num_allocated - num_empty),
        num_reserved_kv_tokens=sum(
            kv.blocks_for(request.max_total_tokens - 1) * kv.block_size for request in running
        ),
        expected_output_tokens=scheduler.admission.expected_length(),
        counters=scheduler.counters,
    )
