"""The requests of a trace on the real scheduler with other parameters, on a clock of predicted steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagedinfer.engine.batch import Batch
from pagedinfer.engine.request import RequestStatus
from pagedinfer.engine.scheduler import RequestUpdate, Scheduler, SchedulerConfig
from pagedinfer.errors import RequestTooLargeError
from pagedinfer.tracing.cost_model import CostModel, features, fit
from pagedinfer.tracing.records import Trace
from pagedinfer.tracing.replay import draw, replay, set_block_bytes
from pagedinfer.tracing.workload import TracedRequest, requests_of


@dataclass(slots=True)
class RequestTimes:
    """Seconds at which things happened to a request; None: they did not."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0  # generated


@dataclass(slots=True)
class Run:
    """What a run came to: the traced one, or one with other parameters."""

    name: str
    times: list[RequestTimes] = field(default_factory=list)
    load: list[tuple[float, int, int]] = field(default_factory=list)  # (seconds, running, waiting) by step
    num_preemptions: int = 0
    num_refused: int = 0
    usage: list[float] = field(default_factory=list)  # share of the blocks that is in use, by step

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        ends = [times.ended for times in self.times if times.ended is not None]
        return max(ends) - min(times.arrived for times in self.times) if ends else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated."""
        seconds = self.seconds
        return sum(times.num_tokens for times in self.times) / seconds if seconds else 0.0

    def waits(self) -> list[float]:
        """Seconds in the queue before the first step."""
        return [t.scheduled - t.arrived for t in self.times if t.scheduled is not None]

    def first_tokens(self) -> list[float]:
        """Seconds from arrival to the first token."""
        return [t.first_token - t.arrived for t in self.times if t.first_token is not None]

    def token_times(self) -> list[float]:
        """Seconds a token after the first, for each request."""
        return [
            (t.ended - t.first_token) / (t.num_tokens - 1)
            for t in self.times
            if t.ended is not None and t.first_token is not None and t.num_tokens > 1
        ]


def traced_run(trace: Trace) -> tuple[Run, CostModel, int]:
    """The run that was traced, the cost model of its steps, and how many steps a replay does otherwise.

    Raises:
        ValueError: the trace has no steps.
    """
    run = Run("traced")
    by_request: dict[str, RequestTimes] = {}
    arrivals = deque(sorted(trace.added, key=lambda added: added.op))
    ends = sorted((ended for ended in _all(trace.ended.values())), key=lambda ended: ended.op)
    measured = []
    num_different = 0
    num_blocks = trace.config["num_blocks"]

    def take_arrivals(op: float) -> None:
        while arrivals and arrivals[0].op < op:
            added = arrivals.popleft()
            by_request[added.request_id] = times = RequestTimes(added.time)
            run.times.append(times)

    position = 0
    for step in replay(trace):
        record = step.record
        take_arrivals(record.ops[0])
        num_different += not step.same
        run.num_preemptions += len(record.preempted)
        for request_id in (*record.admitted, *record.swapping_in):
            times = by_request[request_id]
            times.scheduled = record.time if times.scheduled is None else times.scheduled
        if record.ops[0] == record.ops[1]:
            continue
        end = record.time + record.seconds
        measured.append((features(step.batch), record.seconds))
        run.load.append((end, record.num_running, record.num_waiting))
        run.usage.append(1 - record.num_free / num_blocks)
        for work in step.batch.requests:
            times = by_request[work.request_id]
            times.num_tokens += work.sample
            if work.sample and times.first_token is None:
                times.first_token = end
        while position < len(ends) and ends[position].op <= record.ops[1]:
            ended = ends[position]
            position += 1
            take_arrivals(ended.op)  # it may have come and gone while the step ran
            times = by_request[ended.request_id]
            times.ended, times.num_tokens = ended.time, ended.num_output_tokens
    for ended in ends[position:]:
        take_arrivals(ended.op)
        by_request[ended.request_id].ended = ended.time
    take_arrivals(float("inf"))
    run.num_refused = len(trace.refused)
    return run, fit(measured), num_different


def simulate(trace: Trace, changes: dict[str, Any], costs: CostModel, name: str) -> Run:
    """The same arrivals with other parameters of the scheduler, each step as long as the model says.

    A request generates as many tokens as it did; one that was aborted ends after as many.

    Raises:
        ValueError: parameters that make no sense.
    """
    config = replace(SchedulerConfig(**trace.config), **changes)
    return _Simulation(trace, config, costs, name).run()


class _Simulation:
    def __init__(self, trace: Trace, config: SchedulerConfig, costs: CostModel, name: str) -> None:
        self._scheduler = Scheduler(config)
        self._set_rates(trace)
        self._costs = costs
        self._run = Run(name)
        self._requests: dict[str, TracedRequest] = {}
        self._times: dict[str, RequestTimes] = {}
        self._forks: dict[str, list[TracedRequest]] = {}  # by the parent that has to get so far first
        arrivals = sorted(requests_of(trace).values(), key=lambda request: request.added.op)
        self._arrivals = deque(_with_unique_names(arrivals))
        self._now = self._arrivals[0].added.time if self._arrivals else 0.0

    def _set_rates(self, trace: Trace) -> None:
        """The rates that the traced run had measured in the end."""
        costs = self._scheduler.costs
        set_block_bytes(self._scheduler, trace)
        for step in reversed(trace.steps):
            if step.rates is not None:
                costs.swap_bytes_per_second, costs.prefill_tokens_per_second = step.rates
                return

    def run(self) -> Run:
        scheduler, run = self._scheduler, self._run
        while self._arrivals or scheduler.has_unfinished_requests():
            while self._arrivals and self._arrivals[0].added.time <= self._now:
                self._add(self._arrivals.popleft())
            batch = scheduler.schedule()
            if batch.is_empty():
                if not self._arrivals:
                    break
                self._now = max(self._now, self._arrivals[0].added.time)
                continue
            self._step(batch)
        return run

    def _step(self, batch: Batch) -> None:
        scheduler, run = self._scheduler, self._run
        for admitted in batch.admitted:
            times = self._times[admitted.request_id]
            times.scheduled = self._now if times.scheduled is None else times.scheduled
        self._now += self._costs.predict(batch)
        run.num_preemptions += len(scheduler.preempted)
        run.load.append((self._now, len(scheduler.running), len(scheduler.waiting) + len(scheduler.forks)))
        run.usage.append(1 - scheduler.kv.num_free / scheduler.config.num_blocks)
        for update in scheduler.update(batch, draw(batch, self._requests)):
            self._take(update)

    def _add(self, request: TracedRequest) -> None:
        added = request.added
        name = added.request_id
        self._requests[name] = request
        self._times[name] = times = RequestTimes(self._now if added.parent else added.time)
        self._run.times.append(times)
        parent = self._scheduler.requests.get(added.parent or "")
        try:
            if parent is None:
                self._scheduler.add_request(request.make())
            elif parent.num_output_tokens < added.num_given_tokens:
                self._forks.setdefault(parent.request_id, []).append(request)
                self._run.times.remove(times)
            else:
                self._scheduler.fork(parent.request_id, request.make())
        except RequestTooLargeError:
            self._run.num_refused += 1
            self._run.times.remove(times)

    def _take(self, update: RequestUpdate) -> None:
        name = update.request_id
        times, traced = self._times[name], self._requests[name]
        times.num_tokens = update.request.num_output_tokens
        if times.first_token is None:
            times.first_token = self._now
        finished = update.finish_reason is not None
        if not finished and traced.ended is not None and traced.ended.outside:
            # From here on the traced run did not want it any more.
            status = (
                RequestStatus.FINISHED_STOPPED
                if traced.ended.reason == "stop"
                else RequestStatus.FINISHED_ABORTED
            )
            if times.num_tokens >= max(1, traced.ended.num_output_tokens):
                finished = self._scheduler.finish_request(name, status)
        if finished:
            times.ended = self._now
        waiting = self._forks.pop(name, [])
        for fork in waiting:
            if finished or fork.added.num_given_tokens <= times.num_tokens:
                self._add(fork)
            else:
                self._forks.setdefault(name, []).append(fork)


def _with_unique_names(requests: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Names may come again in a trace, and here two of a name might be there at once."""
    last: dict[str, str] = {}
    renamed = []
    for number, request in enumerate(requests):
        added = request.added
        name = f"{added.request_id}/{number}"
        parent = None if added.parent is None else last.get(added.parent)
        last[added.request_id] = name
        renamed.append(replace(request, added=replace(added, request_id=name, parent=parent)))
    return renamed


def _all(groups: Any) -> list[Any]:
    return [item for group in groups for item in group]


def percentile(values: Sequence[float], percent: float) -> float:
    """0 if there are none."""
    return float(np.percentile(values, percent)) if values else 0.0
