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

from collections.abc import Iterable

from pagedinfer.engine.admission import AdmissionControl
from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.decisions import Preempted, Refusal, WaitingReason
from pagedinfer.engine.forks import PendingForks, check_fork
from pagedinfer.engine.kv_cache_manager import KVCacheManager
from pagedinfer.engine.preemption import Preemption, PreemptionCosts
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.request_queue import RequestQueue
from pagedinfer.engine.request_update import RequestUpdate, TopTokens
from pagedinfer.engine.running_requests import RunningRequests
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.engine.size_limits import max_total_tokens
from pagedinfer.engine.stats import SchedulerCounters, SchedulerStats, collect_stats
from pagedinfer.engine.step_planner import StepPlanner
from pagedinfer.engine.streamed_tokens import StreamedTokens
from pagedinfer.engine.urgent_lane import UrgentLane

__all__ = ["RequestUpdate", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Holds all unfinished requests; `schedule` and `update` are called once a step, in this order.

    With overlap, step N + 1 may be scheduled before step N is updated, unless `needs_known_tokens`; updates
    come in step order. Steps of `schedule_urgent` stand beside this order.
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
        self.kv = KVCacheManager(config, self._step)
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.running = RunningRequests(config.max_num_seqs)
        self.waiting = RequestQueue()  # swapped ones included
        self.forks = PendingForks()  # waiting too, but not in the queue yet
        self._sampling: dict[int, list[Request]] = {}  # per step in flight, the requests that draw a token
        self.preemption = Preemption(config, self.kv, self.running, self.waiting, self.costs, self.counters)
        self._planner = StepPlanner(
            config, self.kv, self.running, self.waiting, self.preemption, self.admission, self.counters
        )
        self._lane = UrgentLane(self._planner, self.preemption, self.forks)

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
            self.preemption.holding[child] = None
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
        had_slot = request.slot >= 0
        for child in self.forks.take(request):
            if had_slot:
                self._start_fork(request, child)
            else:
                self.waiting.add(child)
        if had_slot:
            self.running.remove(request)
        elif request.fork_parent is not None:
            self.forks.remove(request)
        else:
            self.waiting.remove(request)
            self.preemption.leave_queue(request)
        self.kv.release(request)
        request.status = status
        request.finished = True
        del self.requests[request.request_id]
        self.counters.num_finished[status.finish_reason or ""] += 1
        complete = status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)
        self.admission.observe_end(request, complete=complete)

    def abort_all(self) -> list[Request]:
        """Ends every request and starts afresh, as `recover` does. Returns them."""
        return self._start_afresh(set(self.requests), RequestStatus.FINISHED_ABORTED)

    def recover(self, request_ids: Iterable[str]) -> list[Request]:
        """The way back after a step that failed, wherever it did: ends these requests, which were in it.

        The others wait again, in their order, to be computed from the tokens that are known of them. Nothing
        else that was known is trusted any more: a step that did not run leaves blocks that count as computed,
        and slots that the runner was not told of. The next batch therefore releases all slots, and steps
        that were scheduled before must not be updated.

        Returns:
            Those that it ended: ids of requests that have finished already are ignored.
        """
        return self._start_afresh(set(request_ids), RequestStatus.FINISHED_ERROR)

    def _start_afresh(self, ending: set[str], status: RequestStatus) -> list[Request]:
        """Ends the requests of these ids, and forgets all but the tokens of the others."""
        requests = list(self.requests.values())
        self._clear()
        self.running.release_all_slots()
        ended = []
        for request in requests:
            is_ending = request.request_id in ending
            self.counters.num_preemptions_recompute += request.slot >= 0 and not is_ending
            request.lose_kv()
            if is_ending:
                request.status, request.finished = status, True
                ended.append(request)
        self.counters.num_finished[status.finish_reason or ""] += len(ended)
        for request in requests:
            if request.finished:
                continue
            self.requests[request.request_id] = request
            parent, request.fork_parent = request.fork_parent, None
            if parent is None or parent.finished:
                self.waiting.add(request)
            else:
                self.forks.add(parent, request)
        return ended

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
        return self._planner.waiting_reason if self.waiting else None

    @property
    def refusal(self) -> Refusal | None:
        """Whom the last step did not admit, and why; None if nobody waits or the step took no newcomers."""
        return self._planner.refusal if self.waiting else None

    @property
    def preempted(self) -> list[Preempted]:
        """Who had to give way in the last step."""
        return self.preemption.preempted

    # ---- one step ----

    @property
    def needs_known_tokens(self) -> bool:
        """Whether a running request needs its tokens known: all steps must be updated before the next."""
        return self.running.num_needing_tokens > 0

    def schedule(self) -> Batch:
        """The next step. A request that is preempted for it is not in its batch.

        An empty batch (`Batch.is_empty`) need not be executed, and must not be updated.
        """
        self._start_forks()
        self._step += 1
        if self.kv.unsettled is not None:
            self.kv.unsettled.begin(self._step)
        step = self._planner.plan(self._step)
        if not step.batch.is_empty():
            step.batch.released_slots = self.running.take_released_slots()
            self._sampling[self._step] = step.sampling
        return step.batch

    def schedule_urgent(self) -> Batch | None:
        """A step of the first waiting request alone, if it is urgent and can run beside those under way.

        It waits for none of the steps that were scheduled before, and those that are scheduled later wait for
        it; it may be updated at any time. None: there is no such request, or it has to take its turn.
        """
        step = self._lane.plan(self._step + 1) if self.config.urgent_lane else None
        if step is None:
            return None
        self._step += 1
        self._sampling[self._step] = step.sampling
        return step.batch

    # ---- what a step gave ----

    def update(
        self, batch: Batch, output: StepOutput, streamed: StreamedTokens | None = None
    ) -> list[RequestUpdate]:
        """Appends the drawn tokens and ends the requests that they end.

        One update for each request that drew a token and has something to report, in the order of the
        output's rows; requests that have ended since the step was scheduled have none.

        Args:
            batch, output: of the step.
            streamed: takes, instead of updates, the tokens of requests with a `stream` that neither begin
                nor end with them.
        """
        sampling = self._sampling.pop(batch.step, None)
        if sampling is None:
            raise ValueError(f"step {batch.step} was not scheduled, or has been updated already")
        if not self._lane.end(batch.step) and self.kv.unsettled is not None:
            self.kv.unsettled.end(batch.step)
        swaps_in_done = batch.step if output.swaps_in_done is None else output.swaps_in_done
        self._planner.swaps_in_done = max(self._planner.swaps_in_done, swaps_in_done)
        tokens: list[int] = output.token_ids.tolist()
        logprobs: list[float] | None = None  # in most steps nobody asks for them
        if len(tokens) != len(sampling):
            raise ValueError(f"step {batch.step} drew {len(sampling)} tokens, its output has {len(tokens)}")
        if len(output.logprobs) != len(tokens):
            raise ValueError(
                f"step {batch.step} drew {len(tokens)} tokens, its output has {len(output.logprobs)} logprobs"
            )
        updates: list[RequestUpdate] = []
        num_generated = 0
        for row, (request, token) in enumerate(zip(sampling, tokens, strict=True)):
            if request.finished:
                continue
            if token < 0:
                self.kv.forget(request)  # whatever made its logits unusable may be in its cache
                self._finish(request, RequestStatus.FINISHED_ERROR)
                updates.append(RequestUpdate(request, row, *request.take_unreported(), "error"))
                continue
            num_generated += 1
            token_ids = request.token_ids
            token_ids.append(token)
            num_tokens = len(token_ids)
            if num_tokens < request.quiet_until and token not in request.stop_set:
                continue
            if num_tokens >= request.next_cacheable:
                self.kv.cache_full_blocks(request)
            status = None
            if num_tokens >= request.max_total_tokens or token in request.stop_set:
                status = request.check_stop()
            if request.reports_at_end:
                if status is None and num_tokens > request.num_prompt_tokens + 1:
                    request.quiet_until = min(request.next_cacheable, request.max_total_tokens)
                    continue
                update = RequestUpdate(request, row, *request.take_unreported())
            elif (
                streamed is not None
                and request.stream is not None
                and status is None
                and num_tokens > request.num_prompt_tokens + 1
            ):
                streamed.streams.append(request.stream)
                streamed.token_ids.append(token)
                continue
            else:
                if logprobs is None:
                    logprobs = output.logprobs.tolist()
                update = RequestUpdate(request, row, [token], [logprobs[row]])
            updates.append(update)
            if request.num_logprobs is not None:
                if output.best is None:
                    raise ValueError("a request of this step asks for the best tokens, and it reports none")
                update.top = TopTokens.of_row(output.best, row, request.num_logprobs)
            if status is not None:
                self._finish(request, status)
                update.finish_reason = status.finish_reason
                update.stop_reason = request.stop_reason
        self.counters.num_generated_tokens += num_generated
        refusal, reason = self.refusal, self.waiting_reason
        if reason is not None and (refusal is None or not refusal.cause):
            self.counters.limited_steps[reason] += 1
        return updates
