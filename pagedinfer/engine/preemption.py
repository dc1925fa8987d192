"""Giving up KV blocks: by moving them to the CPU, or by computing them again, whichever is cheaper."""

from __future__ import annotations

from typing import Literal

from pagedinfer.engine.decisions import Preempted, WaitingReason
from pagedinfer.engine.kv_cache_manager import KVCacheManager
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.request_queue import RequestQueue
from pagedinfer.engine.running_requests import RunningRequests
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.engine.stats import SchedulerCounters

# How much of an old measurement survives a new one.
_MEMORY = 0.8


class PreemptionCosts:
    """Rates that decide between swap and recomputation, from guesses to what was measured.

    Whoever runs the steps reports what it measures through `observe_swap` and `observe_prefill`; the
    rates can also be set. The estimates are in seconds.
    """

    def __init__(
        self,
        block_bytes: int = 2 << 20,
        swap_bytes_per_second: float = 25e9,
        prefill_tokens_per_second: float = 10_000.0,
    ) -> None:
        """The defaults: 16 tokens of an 8B model in bf16, and a modest GPU behind PCIe 4."""
        self.block_bytes = block_bytes  # of one KV block, all layers
        self.swap_bytes_per_second = swap_bytes_per_second  # one way
        self.prefill_tokens_per_second = prefill_tokens_per_second

    def observe_swap(self, num_blocks: int, seconds: float) -> None:
        """`num_blocks` were moved in one direction within `seconds`."""
        if num_blocks > 0 and seconds > 0:
            rate = num_blocks * self.block_bytes / seconds
            self.swap_bytes_per_second += (1 - _MEMORY) * (rate - self.swap_bytes_per_second)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` within `seconds`; only steps of many tokens tell the rate."""
        if num_tokens > 0 and seconds > 0:
            rate = num_tokens / seconds
            self.prefill_tokens_per_second += (1 - _MEMORY) * (rate - self.prefill_tokens_per_second)

    def transfer_seconds(self, num_blocks: int) -> float:
        """One way."""
        return num_blocks * self.block_bytes / self.swap_bytes_per_second

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_second

    def prefer_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving a request out and in again is cheaper than computing its tokens again."""
        return 2 * self.transfer_seconds(num_blocks) <= self.recompute_seconds(num_tokens)

    def prefer_fetch(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether bringing cached blocks back from the CPU is cheaper than computing them again."""
        return self.transfer_seconds(num_blocks) <= self.recompute_seconds(num_tokens)


class Preemption:
    """Takes blocks back from requests that run, and from forks that hold some while they wait."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: RunningRequests,
        waiting: RequestQueue,
        costs: PreemptionCosts,
        counters: SchedulerCounters,
    ) -> None:
        self.config = config
        self.kv = kv
        self.running = running
        self.waiting = waiting
        self.costs = costs
        self.counters = counters
        self.num_swapped = 0  # requests in the queue whose KV is in CPU blocks
        self.preempted: list[Preempted] = []  # in the step that is being planned
        self.holding: dict[Request, None] = {}  # forks in the queue that share KV already, in order

    def shed_forks(self, keep: Request | None) -> bool:
        """Forks that wait give up the KV that they share, but `keep`; False if there are none.

        They compute it again if nobody else has it by then.
        """
        forks = [fork for fork in self.holding if fork is not keep]
        for fork in forks:
            del self.holding[fork]
            self.kv.release(fork)
            fork.num_computed_tokens = 0
        return bool(forks)

    def preempt(self, request: Request, by: Request, lack: WaitingReason) -> None:
        """Back to the waiting ones, its KV in CPU blocks or to be computed again: `by` lacks something."""
        self.running.remove(request)
        request.num_preemptions += 1
        num_tokens, num_blocks = request.num_computed_tokens, len(request.block_ids)
        self._give_up_blocks(request, lack)
        kind: Literal["swap", "recompute"] = (
            "swap" if request.status is RequestStatus.SWAPPED else "recompute"
        )
        self.preempted.append(
            Preempted(request.request_id, by.request_id, lack, kind, num_tokens, num_blocks)
        )
        self.waiting.add(request)

    def _give_up_blocks(self, request: Request, lack: WaitingReason) -> None:
        if request.cpu_block_ids:  # on its way back: all of it is on the CPU still
            self.kv.cancel_swap_in(request)
            self._count_swapped(request)
            return
        if request.status is RequestStatus.SWAPPING_IN:  # a prefix that has not arrived
            self._drop(request)
            return
        mode = self.config.preemption_mode
        if mode == "auto":
            num_blocks = self.kv.blocks_for(request.num_computed_tokens)
            prefer_swap = self.costs.prefer_swap(num_blocks, request.num_computed_tokens)
            mode = "swap" if prefer_swap and not self._stays_known(request, lack) else "recompute"
        if mode == "swap" and self.kv.swap_out(request):
            self._count_swapped(request)
        else:
            self._drop(request)

    def _stays_known(self, request: Request, lack: WaitingReason) -> bool:
        """Whether the prefix cache will still have what it drops: its slot is needed, and not its blocks.

        Older blocks are handed out before its own, if there are as many.
        """
        return (
            lack == "slots"
            and self.config.enable_prefix_caching
            and not request.skip_reading_prefix_cache
            and self.kv.num_free >= len(request.block_ids)
        )

    def _count_swapped(self, request: Request) -> None:
        request.status = RequestStatus.SWAPPED
        self.num_swapped += 1
        self.counters.num_preemptions_swap += 1

    def _drop(self, request: Request) -> None:
        self.kv.release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        self.counters.num_preemptions_recompute += 1

    def leave_queue(self, request: Request) -> None:
        """A waiting request is admitted, or ends."""
        self.num_swapped -= request.status is RequestStatus.SWAPPED
        self.holding.pop(request, None)
