"""Continuous batching: decides, step by step, which tokens of which requests are computed.

There are no phases. A request has `num_tokens` tokens and `num_computed_tokens` of them in the KV
cache; a step moves the second towards the first for as many requests as the token budget allows, so
that prompts in chunks, decodes and recomputations are all the same thing. Running requests come first,
the most urgent in front; then waiting ones are admitted in the order of their urgency.

Both counters advance in `schedule`, before the step has run: a token that is being drawn counts as a
token whose id is not known yet. The next step can thus be scheduled while this one is under way.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest, StepOutput
from pagedinfer.engine.kv_cache_manager import KVCacheManager
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.request_queue import RequestQueue, by_urgency
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.errors import RequestTooLargeError

__all__ = ["RequestUpdate", "Scheduler", "SchedulerConfig"]


@dataclass(slots=True)
class RequestUpdate:
    """What a step meant for one request: a token, its end, or both."""

    request: Request
    row: int  # its row in the StepOutput
    new_token_ids: list[int]  # empty if no token could be sampled
    logprobs: list[float]  # of these tokens
    finish_reason: str | None = None  # "stop", "length" or "error"; None: goes on
    stop_reason: int | str | None = None  # the stop token's id; None for EOS

    @property
    def request_id(self) -> str:
        return self.request.request_id


class Scheduler:
    """Holds all unfinished requests; `schedule` and `update` are called once a step, in this order.

    With overlap, step N + 1 may be scheduled before step N is updated; updates come in step order.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(config)
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.running: list[Request] = []  # the most urgent first
        self.waiting = RequestQueue()
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first
        self._released_slots: list[int] = []  # not told to the runner yet
        self._step = 0
        self._num_arrivals = 0
        self._sampling: dict[int, list[Request]] = {}  # per step in flight, the requests that draw a token

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: an unfinished request has the same id.
            RequestTooLargeError: it can never run; the message has both sizes and what to change.
        """
        if request.request_id in self.requests:
            raise ValueError(f"there is an unfinished request {request.request_id!r} already")
        self._check_size(request)
        self._num_arrivals += 1
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        request.urgency = (priority, self._num_arrivals, 0)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def _check_size(self, request: Request) -> None:
        config = self.config
        num_tokens = request.num_tokens
        if num_tokens >= config.max_model_len:
            raise RequestTooLargeError(
                f"request {request.request_id!r}: its prompt has {num_tokens} tokens, and with at least one "
                f"token to generate that is more than max_model_len={config.max_model_len}; shorten the "
                f"prompt or raise max_model_len"
            )
        max_tokens = request.sampling_params.max_tokens
        max_total = config.max_model_len
        if max_tokens is not None:
            max_total = min(max_total, request.num_prompt_tokens + max_tokens)
        if max_total <= num_tokens:
            raise ValueError(
                f"request {request.request_id!r}: max_tokens={max_tokens} leaves nothing to generate "
                f"after {num_tokens - request.num_prompt_tokens} tokens"
            )
        if max_total - 1 > config.num_kv_tokens:  # the last token's KV is never needed
            raise RequestTooLargeError(
                f"request {request.request_id!r}: its prompt of {request.num_prompt_tokens} tokens and up to "
                f"{max_total - request.num_prompt_tokens} generated ones need KV memory for "
                f"{max_total - 1} tokens, but there is room for {config.num_kv_tokens}; lower max_tokens, "
                f"shorten the prompt or raise gpu_memory_utilization (kv_cache_memory_bytes on a CPU)"
            )
        request.max_total_tokens = max_total

    def abort_request(self, request_id: str) -> bool:
        """Ends a request in whatever state it is; False if there is no such unfinished request."""
        return self.finish_request(request_id, RequestStatus.FINISHED_ABORTED)

    def finish_request(
        self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None
    ) -> bool:
        """Ends a request from outside and frees all it holds; False if it is not there (any more)."""
        if not status.is_finished:
            raise ValueError(f"a request finishes with a finished status, not {status}")
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.stop_reason = stop_reason
        self._finish(request, status)
        return True

    def abort_all(self) -> list[Request]:
        """Ends every request and forgets the prefix cache: the way back after a step that failed.

        A step that was scheduled and did not run leaves blocks that are known but were never computed,
        and slots that the runner was not told of; the next batch therefore releases all slots.
        """
        aborted = list(self.requests.values())
        for request in aborted:
            self._finish(request, RequestStatus.FINISHED_ABORTED)
        self.kv.reset_prefix_cache()
        self._sampling.clear()
        self._released_slots = list(range(self.config.max_num_seqs))
        return aborted

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # ---- one step ----

    def schedule(self) -> Batch:
        """The next step. A request that is preempted for it is not in its batch.

        An empty batch (`Batch.is_empty`) need not be executed, and must not be updated.
        """
        self._step += 1
        batch = Batch(self._step)
        sampling: list[Request] = []
        budget, short_of_blocks = self._schedule_running(batch, sampling)
        if self.waiting and not short_of_blocks:
            self._admit(batch, sampling, budget)
        if not batch.is_empty():
            batch.released_slots, self._released_slots = self._released_slots, []
            self._sampling[batch.step] = sampling
        return batch

    def _schedule_running(self, batch: Batch, sampling: list[Request]) -> tuple[int, bool]:
        """Returns the token budget that is left, and whether somebody lacked blocks."""
        running = self.running
        num_running = len(running)
        budget = self.config.max_num_batched_tokens
        decodes_behind: int | None = None  # running requests behind this one that want a single token
        stalled = False
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            index += 1
            start = request.num_computed_tokens
            num_tokens = request.num_tokens - start
            if num_tokens == 1:
                if decodes_behind is not None:
                    decodes_behind -= 1
                if request.num_tokens == request.max_total_tokens:
                    continue  # a step in flight is drawing its last token
            else:
                if decodes_behind is None:
                    decodes_behind = sum(r.num_tokens - r.num_computed_tokens == 1 for r in running[index:])
                # A long prompt leaves those behind it their next token, and gets one itself at least.
                num_tokens = self._chunk(num_tokens, max(1, budget - decodes_behind))
            new_blocks: list[int] = []
            if start + num_tokens > request.capacity:
                if not self._make_room(request, start + num_tokens):
                    stalled = True
                    break
                new_blocks = self.kv.grow(request, start + num_tokens)
            budget -= num_tokens
            self._compute(request, num_tokens, new_blocks, batch, sampling)
        return budget, stalled or len(running) < num_running

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Preempts from the least urgent on until `request` can grow; False if it is itself the last.

        It then keeps what it holds and waits: whoever is more urgent may still take its blocks.
        """
        needed = self.kv.blocks_for(num_tokens - request.capacity)
        while self.kv.num_free < needed:
            if self.running[-1] is request:
                return False
            self._preempt(self.running[-1])
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the waiting ones, its KV to be computed again."""
        self._leave_slot(request)
        self.kv.release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def _admit(self, batch: Batch, sampling: list[Request], budget: int) -> None:
        """Admits waiting requests in their order while slots, budget and blocks last."""
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting.first()
            if request.has_unknown_tokens:
                break  # preempted while a step in flight draws its token
            prefix = self.kv.find_prefix(request)
            start = len(prefix) * self.kv.block_size
            num_tokens = self._chunk(request.num_tokens - start, budget)
            if num_tokens > budget:
                break
            reserve = int(self.config.watermark * self.config.num_blocks) if self.running else 0
            if self.kv.num_needed(prefix, start + num_tokens) + reserve > self.kv.num_free:
                break
            self.waiting.pop()
            self.kv.admit(request, prefix, start + num_tokens)
            if request.num_preemptions == 0:
                request.num_cached_tokens = start
            self._take_slot(request, batch)
            budget -= num_tokens
            self._compute(request, num_tokens, [], batch, sampling)

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """How many of a prompt's `num_tokens` tokens this step computes; may exceed the budget unchunked."""
        if not self.config.enable_chunked_prefill:
            return num_tokens
        if self.config.long_prefill_token_threshold:
            num_tokens = min(num_tokens, self.config.long_prefill_token_threshold)
        return min(num_tokens, budget)

    def _compute(
        self,
        request: Request,
        num_tokens: int,
        new_block_ids: list[int],
        batch: Batch,
        sampling: list[Request],
    ) -> None:
        """Puts the next `num_tokens` tokens of a running request into the batch."""
        start = request.num_computed_tokens
        end = start + num_tokens
        request.num_computed_tokens = end
        sample = end == request.num_tokens
        if sample:
            request.num_tokens += 1
            sampling.append(request)
        if num_tokens > 1:  # a decode's block can be cached when its token is known: see update
            self._cache_full_blocks(request)
        batch.requests.append(
            ScheduledRequest(request.request_id, request.slot, start, num_tokens, sample, new_block_ids)
        )

    def _take_slot(self, request: Request, batch: Batch) -> None:
        request.slot = heapq.heappop(self._free_slots)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=by_urgency)
        batch.admitted.append(
            AdmittedRequest(
                request_id=request.request_id,
                slot=request.slot,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=request.block_ids.copy(),
                sampling_params=request.sampling_params,
                seed=request.seed,
            )
        )

    def _leave_slot(self, request: Request) -> None:
        del self.running[bisect_left(self.running, request.urgency, key=by_urgency)]
        heapq.heappush(self._free_slots, request.slot)
        self._released_slots.append(request.slot)
        request.slot = -1

    # ---- what a step gave ----

    def update(self, batch: Batch, output: StepOutput) -> list[RequestUpdate]:
        """Appends the drawn tokens and ends the requests that they end.

        One update for each request that drew a token, in the order of the output's rows; requests that
        have ended since the step was scheduled have none.
        """
        sampling = self._sampling.pop(batch.step, None)
        if sampling is None:
            raise ValueError(f"step {batch.step} was not scheduled, or has been updated already")
        updates: list[RequestUpdate] = []
        tokens: list[int] = output.token_ids.tolist()
        logprobs: list[float] = output.logprobs.tolist()
        if len(tokens) != len(sampling):
            raise ValueError(f"step {batch.step} drew {len(sampling)} tokens, its output has {len(tokens)}")
        for row, request in enumerate(sampling):
            if request.finished:
                continue
            token = tokens[row]
            if token < 0:
                self.kv.forget(request)  # whatever made its logits unusable may be in its cache
                self._finish(request, RequestStatus.FINISHED_ERROR)
                updates.append(RequestUpdate(request, row, [], [], "error"))
                continue
            request.token_ids.append(token)
            update = RequestUpdate(request, row, [token], [logprobs[row]])
            updates.append(update)
            self._cache_full_blocks(request)
            status = request.check_stop()
            if status is not None:
                self._finish(request, status)
                update.finish_reason = status.finish_reason
                update.stop_reason = request.stop_reason
        return updates

    def _cache_full_blocks(self, request: Request) -> None:
        if request.num_computed_tokens >= request.next_cacheable:
            self.kv.cache_full_blocks(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Ends a request in whatever state it is, and frees what it holds."""
        if request.status is RequestStatus.RUNNING:
            self._leave_slot(request)
            self.kv.release(request)
        else:
            self.waiting.remove(request)
        request.status = status
        request.finished = True
        del self.requests[request.request_id]
