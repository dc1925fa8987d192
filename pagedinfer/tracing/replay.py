"""Runs the real scheduler over a trace again, and tells whether it does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.request import RequestStatus
from pagedinfer.engine.scheduler import Scheduler, SchedulerConfig
from pagedinfer.tracing.checksum import checksum
from pagedinfer.tracing.records import StepRecord, Trace
from pagedinfer.tracing.workload import TracedRequest, requests_of

_STATUS = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
}


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step of the trace, and what the scheduler did there this time."""

    record: StepRecord
    batch: Batch
    same: bool


def replay(trace: Trace) -> Iterator[ReplayedStep]:
    """Every step of the trace, scheduled again with its own parameters by the same calls in their order."""
    return _Replay(trace).steps()


def draw(batch: Batch, requests: dict[str, TracedRequest]) -> StepOutput:
    """The tokens that the traced run drew, for the rows of a batch."""
    rows = [
        requests[work.request_id].token(work.start + work.num_tokens)
        for work in batch.requests
        if work.sample
    ]
    return StepOutput(np.array(rows, np.int64), np.zeros(len(rows), np.float32))


def set_block_bytes(scheduler: Scheduler, trace: Trace) -> None:
    """What moving a block costs depends on its size, which only the engine knew."""
    scheduler.costs.block_bytes = trace.engine.get("block_bytes", scheduler.costs.block_bytes)


class _Replay:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._scheduler = Scheduler(SchedulerConfig(**trace.config))
        set_block_bytes(self._scheduler, trace)
        self._requests: dict[str, TracedRequest] = {}  # by id, the last of that name
        self._batches: dict[int, Batch] = {}  # scheduled and not updated

    def steps(self) -> Iterator[ReplayedStep]:
        for _, call in sorted(self._calls(), key=lambda item: item[0]):
            step = call()
            if step is not None:
                yield step

    def _calls(self) -> Iterator[tuple[int, Callable[[], ReplayedStep | None]]]:
        """What was called, by when."""
        for op, request in requests_of(self._trace).items():
            yield op, lambda request=request: self._add(request)  # type: ignore[misc]
        calls = {op for op, _ in self._trace.calls}
        for ends in self._trace.ended.values():
            for ended in ends:
                if ended.outside and ended.op not in calls:
                    name, status = ended.request_id, _STATUS[ended.reason]
                    yield ended.op, lambda n=name, s=status: self._finish(n, s)  # type: ignore[misc]
        for op, name in self._trace.calls:
            yield op, lambda op=op, name=name: self._call(op, name)  # type: ignore[misc]
        for step in self._trace.steps:
            yield step.ops[0], lambda step=step: self._schedule(step)  # type: ignore[misc]
            if step.ops[1] != step.ops[0]:
                yield step.ops[1], lambda step=step: self._update(step)  # type: ignore[misc]

    def _add(self, request: TracedRequest) -> None:
        added = request.added
        self._requests[added.request_id] = request
        if added.parent is not None and added.parent in self._scheduler.requests:
            self._scheduler.fork(added.parent, request.make())
        else:
            self._scheduler.add_request(request.make())

    def _finish(self, request_id: str, status: RequestStatus) -> None:
        self._scheduler.finish_request(request_id, status)

    def _call(self, op: int, name: str) -> None:
        if name == "reset_prefix_cache":
            self._scheduler.reset_prefix_cache()
            return
        self._batches.clear()
        if name == "abort_all":
            self._scheduler.abort_all()
        else:
            ended = [each for ends in self._trace.ended.values() for each in ends]
            self._scheduler.recover(each.request_id for each in ended if each.op == op)

    def _schedule(self, record: StepRecord) -> ReplayedStep:
        scheduler = self._scheduler
        if record.rates is not None:
            scheduler.costs.swap_bytes_per_second, scheduler.costs.prefill_tokens_per_second = record.rates
        scheduler._step = (
            record.number - 1
        )  # steps that came to nothing, when nobody was there, are not traced
        batch = scheduler.schedule()
        self._batches[record.number] = batch
        same = (
            checksum(batch, batch.num_tokens) == record.checksum
            and [admitted.request_id for admitted in batch.admitted] == record.admitted
            and [list(each) for each in scheduler.preempted] == record.preempted
            and (len(batch.swaps_out), len(batch.swaps_in)) == record.swaps
        )
        return ReplayedStep(record, batch, same)

    def _update(self, record: StepRecord) -> None:
        batch = self._batches.pop(record.number, None)
        if batch is None or batch.is_empty():
            return
        output = draw(batch, self._requests)
        output.swaps_in_done = record.swaps_in_done
        self._scheduler.update(batch, output)
