"""Continuous batching: decides, step by step, which tokens of which requests are computed.

There are no phases. A request has `num_tokens` tokens and `num_computed_tokens` of them in the KV
cache; a step moves the second towards the first for as many requests as the token budget allows, so
that prompts in chunks, decodes and recomputations are all the same thing. Running requests come first,
the most urgent in front; then waiting ones are admitted in the order of their urgency.

Both counters advance in `schedule`, before the step has run: a token that is being drawn counts as a
token whose id is not known yet. The next step can thus be scheduled while this one is under way.

Why nobody starves: only the least urgent running request is ever preempted, so the most urgent one
always gets its blocks; admission is in order, so it never overtakes; and what is preempted goes back to
its place in the order, ahead of all that never ran.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from pagedinfer.engine.admission import AdmissionControl
from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest, StepOutput
from pagedinfer.engine.forks import PendingForks, check_fork
from pagedinfer.engine.kv_cache_manager import KVCacheManager, Prefix
from pagedinfer.engine.preemption import PreemptionCosts
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.request_queue import RequestQueue
from pagedinfer.engine.request_update import RequestUpdate
from pagedinfer.engine.running_requests import RunningRequests
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.engine.size_limits import max_total_tokens
from pagedinfer.engine.stats import SchedulerCounters, SchedulerStats, WaitingReason, collect_stats

__all__ = ["RequestUpdate", "Scheduler", "SchedulerConfig"]

_RETRY_STEPS = 16  # after so many steps a refused request is looked at again, whatever happened


@dataclass(slots=True)
class _Step:
    """A step while it is being scheduled."""

    batch: Batch
    budget: int  # tokens that may still be added
    sampling: list[Request] = field(default_factory=list)  # those that draw a token
    short_of_blocks: bool = False  # somebody was preempted or got no block: no time for newcomers


class Scheduler:
    """Holds all unfinished requests; `schedule` and `update` are called once a step, in this order.

    With overlap, step N + 1 may be scheduled before step N is updated; updates come in step order.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.costs = PreemptionCosts()
        self.admission = AdmissionControl(config)
        self.counters = SchedulerCounters()
        self._step = 0
        self._num_arrivals = 0
        self._num_forks = 0
        self._clear()

    def _clear(self) -> None:
        """No requests, all blocks and slots free, nothing known."""
        config = self.config
        self.kv = KVCacheManager(config)
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.running = RunningRequests(config.max_num_seqs)
        self.waiting = RequestQueue()  # swapped ones included
        self.forks = PendingForks()  # waiting too, but not in the queue yet
        self._holding: dict[Request, None] = {}  # forks in the queue that share KV already
        self._sampling: dict[int, list[Request]] = {}  # per step in flight, the requests that draw a token
        self._waiting_reason: WaitingReason | None = None
        self._refused: tuple[Request, int] | None = None  # and the admission's events by then
        self._retry_step = 0

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: an unfinished request has the same id, or there is nothing to generate.
            RequestTooLargeError: it can never run; the message has both sizes and what to change.
        """
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        self._register(request, (priority, self._num_arrivals + 1, 0))
        self._num_arrivals += 1
        self.waiting.add(request)

    def fork(self, parent_id: str, child: Request) -> None:
        """Queues a request that shares the KV of an unfinished one, with its urgency.

        All tokens of `child` but the last must be the first of its parent's: the prompt alone for a
        further choice of it, or all that was generated, with another last token, for a beam. It waits
        until its parent has computed what they share, computes nothing of that again, and goes on alone
        whatever becomes of its parent.

        Raises:
            ValueError: there is no such parent, or the tokens or the cache_salt differ; and as
                `add_request`.
            RequestTooLargeError: as `add_request`.
        """
        parent = self.requests.get(parent_id)
        if parent is None:
            raise ValueError(f"there is no unfinished request {parent_id!r} to fork from")
        check_fork(parent, child)
        priority, arrival, _ = parent.urgency
        self._register(child, (priority, arrival, self._num_forks + 1))
        self._num_forks += 1
        self.forks.add(parent, child)
        self._start_forks()

    def _register(self, request: Request, urgency: tuple[int, int, int]) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"there is an unfinished request {request.request_id!r} already")
        request.max_total_tokens = max_total_tokens(request, self.config)
        request.urgency = urgency
        self.requests[request.request_id] = request

    def _start_forks(self) -> None:
        for parent, child in self.forks.take_ready():
            self._start_fork(parent, child)

    def _start_fork(self, parent: Request, child: Request) -> None:
        """Queues a fork, with what it can share of a running parent."""
        if parent.num_computed_tokens > 0:
            self.kv.fork(parent, child)
            self._holding[child] = None
        self.waiting.add(child)

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

    def _finish(self, request: Request, status: RequestStatus) -> None:
        was_running = request.status is RequestStatus.RUNNING
        for child in self.forks.take(request):
            if was_running:
                self._start_fork(request, child)
            else:
                self.waiting.add(child)
        if was_running:
            self.running.remove(request)
        elif request.fork_parent is not None:
            self.forks.remove(request)
        else:
            self.waiting.remove(request)
            self._holding.pop(request, None)
        self.kv.release(request)
        request.status = status
        request.finished = True
        del self.requests[request.request_id]
        self.counters.num_finished[status.finish_reason or ""] += 1
        complete = status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)
        self.admission.observe_end(request, complete=complete)

    def abort_all(self) -> list[Request]:
        """Ends every request and starts afresh: the way back after a step that failed, wherever it did.

        Nothing that was known is trusted any more: a step that did not run leaves blocks that count as
        computed, and slots that the runner was not told of. The next batch therefore releases all slots.
        """
        aborted = list(self.requests.values())
        for request in aborted:
            request.status = RequestStatus.FINISHED_ABORTED
            request.finished = True
            request.block_ids, request.cpu_block_ids, request.slot = [], [], -1
        self.counters.num_finished["abort"] += len(aborted)
        self._clear()
        self.running.release_all_slots()
        return aborted

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of earlier prompts; requests that run keep theirs and finish with it."""
        self.kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """How things stand between two steps."""
        return collect_stats(self)

    @property
    def waiting_reason(self) -> WaitingReason | None:
        """What the first waiting request lacked in the last step; None if nobody waits."""
        return self._waiting_reason if self.waiting else None

    # ---- one step ----

    def schedule(self) -> Batch:
        """The next step. A request that is preempted for it is not in its batch.

        An empty batch (`Batch.is_empty`) need not be executed, and must not be updated.
        """
        self._step += 1
        step = _Step(Batch(self._step), self.config.max_num_batched_tokens)
        self._start_forks()
        first = 0
        if self.waiting and self.config.scheduling_policy == "priority":
            first = self._schedule_urgent(step)
        self._schedule_running(step, first, len(self.running))
        if self.waiting:
            self._waiting_reason = "blocks"
            while not step.short_of_blocks and self.waiting and self._admit_first(step):
                pass
        batch = step.batch
        self.kv.end_step(batch)
        if not batch.is_empty():
            batch.released_slots = self.running.take_released_slots()
            self._sampling[batch.step] = step.sampling
            self.counters.count_batch(batch, self.config.max_num_batched_tokens - step.budget)
        return batch

    def _schedule_urgent(self, step: _Step) -> int:
        """Admits those that are strictly more urgent than somebody running, if need be in their place.

        Requests that run and are at least as urgent go first. Returns how many of the running ones,
        from the front on, have had their turn.
        """
        done = 0
        while self.waiting and done < len(self.running):
            priority = self.waiting.first().urgency[0]
            peers = self.running.num_at_least_as_urgent(priority)
            if peers == len(self.running):
                break
            self._schedule_running(step, done, peers)
            done = min(peers, len(self.running))
            if not self._admit_first(step):
                break
            done += 1
        return done

    def _schedule_running(self, step: _Step, first: int, last: int) -> None:
        """Gives running requests `first` to `last` their next tokens, while budget and blocks last."""
        running = self.running.by_urgency
        add_to_batch = step.batch.requests.append
        add_to_sampling = step.sampling.append
        budget = step.budget
        decodes_behind: int | None = None  # running requests behind this one that want a single token
        # Preemption takes requests off the end of the list, and so ends this loop early.
        for index, request in enumerate(islice(running, first, last), start=first + 1):
            if budget <= 0:
                break
            start = request.num_computed_tokens
            end = request.num_tokens
            if end - start > 1:
                if decodes_behind is None:
                    decodes_behind = _num_decodes(running, index)
                # A long prompt leaves those behind it their next token, and gets one itself at least.
                end = start + self._chunk(end - start, max(1, budget - decodes_behind))
            else:
                if decodes_behind is not None:
                    decodes_behind -= 1
                if end == request.max_total_tokens:
                    continue  # a step in flight is drawing its last token
            new_blocks: list[int] = []
            if end > request.capacity:
                if not self._make_room(step, request, end):
                    break
                new_blocks = self.kv.grow(request, end)
            # What follows is `_compute`, written out: most of a step's time is spent here.
            budget -= end - start
            request.num_computed_tokens = end
            sample = end == request.num_tokens
            if sample:
                request.num_tokens = end + 1
                add_to_sampling(request)
            if end - start > 1 and end >= request.next_cacheable:
                self.kv.cache_full_blocks(request)
            add_to_batch(
                ScheduledRequest(request.request_id, request.slot, start, end - start, sample, new_blocks)
            )
        step.budget = budget

    def _compute(self, step: _Step, request: Request, num_tokens: int) -> None:
        """Puts the next `num_tokens` tokens of a request that was just admitted into the step."""
        start = request.num_computed_tokens
        end = start + num_tokens
        step.budget -= num_tokens
        request.num_computed_tokens = end
        sample = end == request.num_tokens
        if sample:
            request.num_tokens = end + 1
            step.sampling.append(request)
        if num_tokens > 1 and end >= request.next_cacheable:
            self.kv.cache_full_blocks(request)  # a decode's block is cached when its token is known
        step.batch.requests.append(
            ScheduledRequest(request.request_id, request.slot, start, num_tokens, sample, [])
        )

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """How many of a prompt's `num_tokens` tokens this step computes; may exceed the budget unchunked."""
        if not self.config.enable_chunked_prefill:
            return num_tokens
        if self.config.long_prefill_token_threshold:
            num_tokens = min(num_tokens, self.config.long_prefill_token_threshold)
        return min(num_tokens, budget)

    # ---- too few blocks ----

    def _make_room(self, step: _Step, request: Request, num_tokens: int) -> bool:
        """Preempts from the least urgent on until `request` can grow; False if it is itself the last.

        It then keeps what it holds and waits: whoever is more urgent may still take its blocks.
        """
        needed = self.kv.blocks_for(num_tokens - request.capacity)
        if self.kv.num_free < needed:
            self._shed_forks(None)
        while self.kv.num_free < needed:
            step.short_of_blocks = True
            if self.running.least_urgent is request:
                self.counters.num_stalls += 1
                return False
            self._preempt(self.running.least_urgent)
            self.admission.observe_preemption()
        return True

    def _shed_forks(self, keep: Request | None) -> bool:
        """Forks that wait give up the KV that they share, but `keep`; False if there are none.

        They compute it again if nobody else has it by then.
        """
        forks = [fork for fork in self._holding if fork is not keep]
        for fork in forks:
            del self._holding[fork]
            self.kv.release(fork)
            fork.num_computed_tokens = 0
        return bool(forks)

    def _preempt(self, request: Request) -> None:
        """Back to the waiting ones, its KV in CPU blocks or to be computed again."""
        self.running.remove(request)
        mode = self.config.preemption_mode
        if mode == "auto":
            num_blocks = self.kv.blocks_for(request.num_computed_tokens)
            prefer_swap = self.costs.prefer_swap(num_blocks, request.num_computed_tokens)
            mode = "swap" if prefer_swap else "recompute"
        if mode == "swap" and self.kv.swap_out(request):
            request.status = RequestStatus.SWAPPED
            self.counters.num_preemptions_swap += 1
        else:
            self.kv.release(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.WAITING
            self.counters.num_preemptions_recompute += 1
        request.num_preemptions += 1
        self.waiting.add(request)

    def _find_more_room(self, step: _Step, request: Request, num_needed: int) -> bool:
        """Takes a slot or blocks from somebody else for a waiting request; False if nobody has to give way.

        Somebody is the least urgent one running, if `request` is strictly more urgent; nobody is
        preempted if even all of its kind together could not make room.
        """
        if not self.running:
            # Only forks that wait hold blocks: the others give theirs back first, then `request`
            # itself, if the copy of a block that it shares is one too many.
            return self._shed_forks(request) or self._shed_forks(None)
        victims = self.running.by_urgency[self.running.num_at_least_as_urgent(request.urgency[0]) :]
        num_gained = sum(len(victim.block_ids) for victim in victims)
        if not victims or num_needed > self.kv.num_free + num_gained:
            return False
        self._preempt(victims[-1])
        step.short_of_blocks = True
        self.counters.num_displaced += 1
        return True

    # ---- admission ----

    def _admit_first(self, step: _Step) -> bool:
        """Admits the first waiting request; False if it has to go on waiting."""
        request = self.waiting.first()
        if request.has_unknown_tokens:
            return False  # preempted while a step in flight draws its token
        if step.budget <= 0:
            self._waiting_reason = "tokens"
            return False
        peers = self.running.num_at_least_as_urgent(request.urgency[0])
        if not self.running.has_free_slot and peers == len(self.running):
            self._waiting_reason = "slots"
            return False
        refusal = (request, self.admission.num_events)
        if self.running and self._refused == refusal and self._step < self._retry_step:
            return False
        reserved = _num_decodes(self.running.by_urgency, peers)  # next tokens of the less urgent
        while True:
            prefix = self._find_prefix(request)
            start = max(request.num_computed_tokens, len(prefix) * self.kv.block_size)
            num_tokens = self._chunk(request.num_tokens - start, max(1, step.budget - reserved))
            if num_tokens > step.budget:
                self._waiting_reason = "tokens"
                return False
            num_needed = self.kv.num_needed(request, prefix, start + num_tokens)
            fits = self._will_fit(request, prefix, peers)
            if fits and num_needed <= self.kv.num_free and self.running.has_free_slot:
                break
            # Whatever gives blocks back may change what the prefix cache has: look again after it.
            if not (fits and self._find_more_room(step, request, num_needed)):
                self._waiting_reason = "blocks" if self.running.has_free_slot else "slots"
                self._refused, self._retry_step = refusal, self._step + _RETRY_STEPS
                return False
        self._refused = None
        self._admit(step, request, prefix, num_tokens)
        return True

    def _find_prefix(self, request: Request) -> Prefix:
        prefix = self.kv.find_prefix(request)
        num_behind = len(prefix.cpu_blocks)
        if num_behind and not self.costs.prefer_fetch(num_behind, num_behind * self.kv.block_size):
            prefix = Prefix(prefix.blocks, [])
        return prefix

    def _will_fit(self, request: Request, prefix: Prefix, peers: int) -> bool:
        """Whether there will be room for `request` as it and those `peers` that it cannot displace grow."""
        running = self.running.by_urgency
        limits = self.running.num_limit_tokens
        if peers == 0 or self.admission.fits_at_worst(request, len(running), limits):
            return True
        num_shared = request.num_shared_blocks or len(prefix.blocks)
        num_own = self.kv.blocks_for(request.num_tokens) - num_shared
        num_used = self.config.num_blocks - self.kv.num_free
        num_used += self.kv.num_needed(request, prefix, request.num_tokens)
        num_used -= sum(len(other.block_ids) - other.num_shared_blocks for other in running[peers:])
        return self.admission.fits(running[:peers], request, num_own, num_used)

    def _admit(self, step: _Step, request: Request, prefix: Prefix, num_tokens: int) -> None:
        """Gives the first waiting request a slot and its next `num_tokens` tokens."""
        self.waiting.pop()
        self._holding.pop(request, None)
        if request.num_preemptions == 0:
            request.num_cached_tokens = len(prefix) * self.kv.block_size
            self.counters.count_admission(request, len(prefix.cpu_blocks) * self.kv.block_size)
        start = max(request.num_computed_tokens, len(prefix) * self.kv.block_size)
        self.kv.admit(request, prefix, start + num_tokens)
        request.status = RequestStatus.RUNNING
        self.running.add(request)
        step.batch.admitted.append(
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
        self._compute(step, request, num_tokens)

    # ---- what a step gave ----

    def update(self, batch: Batch, output: StepOutput) -> list[RequestUpdate]:
        """Appends the drawn tokens and ends the requests that they end.

        One update for each request that drew a token, in the order of the output's rows; requests that
        have ended since the step was scheduled have none.
        """
        sampling = self._sampling.pop(batch.step, None)
        if sampling is None:
            raise ValueError(f"step {batch.step} was not scheduled, or has been updated already")
        tokens: list[int] = output.token_ids.tolist()
        logprobs: list[float] = output.logprobs.tolist()
        if len(tokens) != len(sampling):
            raise ValueError(f"step {batch.step} drew {len(sampling)} tokens, its output has {len(tokens)}")
        updates: list[RequestUpdate] = []
        for row, (request, token, logprob) in enumerate(zip(sampling, tokens, logprobs, strict=True)):
            if request.finished:
                continue
            if token < 0:
                self.kv.forget(request)  # whatever made its logits unusable may be in its cache
                self._finish(request, RequestStatus.FINISHED_ERROR)
                updates.append(RequestUpdate(request, row, [], [], "error"))
                continue
            token_ids = request.token_ids
            token_ids.append(token)
            if request.num_computed_tokens >= request.next_cacheable:
                self.kv.cache_full_blocks(request)
            update = RequestUpdate(request, row, [token], [logprob])
            updates.append(update)
            if len(token_ids) >= request.max_total_tokens or token in request.stop_set:
                status = request.check_stop()
                if status is not None:
                    self._finish(request, status)
                    update.finish_reason = status.finish_reason
                    update.stop_reason = request.stop_reason
        self.counters.num_generated_tokens += len(updates)
        return updates


def _num_decodes(requests: list[Request], first: int) -> int:
    """How many from `first` on want a single token."""
    return sum(r.num_tokens - r.num_computed_tokens == 1 for r in requests[first:])
