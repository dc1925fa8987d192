"""A scheduler that writes down what it does."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.request_update import RequestUpdate
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.engine.streamed_tokens import StreamedTokens
from pagedinfer.errors import RequestTooLargeError
from pagedinfer.tracing.checksum import checksum
from pagedinfer.tracing.content_ids import ContentIds, Ranges
from pagedinfer.tracing.records import FORMAT

_BUFFER_BYTES = 1 << 16
_STEPS_PER_COUNTER = 8
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class TracingScheduler(Scheduler):
    """A scheduler with a trace in a file; see `records` for what is in it.

    Args:
        config: of the scheduler.
        path: the file, which is replaced if there is one; compressed if it ends in .gz.
        engine: what else to say at its head, such as the model and the device.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, config: SchedulerConfig, path: str, engine: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self._file = _open(path)
        self._contents = ContentIds(config.block_size)
        self._start = time.perf_counter()
        self._last_result = 0.0
        self._was_busy = False  # after it there was something left to do: the time up to the next is a step's
        self._op = 0
        self._states: dict[str, tuple[str, str]] = {}  # what each request's track shows, and its id in JSON
        self._known: dict[str, Ranges] = {}  # the blocks that they came with
        self._open_steps: dict[int, tuple[float, dict[str, Any]]] = {}  # scheduled and not updated
        self._rates = (0.0, 0.0)
        self._steps_to_counters = 0
        self._write("M", "process_name", args={"name": "pagedinfer"})
        self._write("M", "thread_name", tid=1, args={"name": "steps"})
        about = {"format": FORMAT, "started": time.time(), "config": asdict(config), "engine": engine or {}}
        self._write("M", "pagedinfer", args=about)

    def close(self) -> None:
        """Ends the file. The scheduler can go on, and is no longer traced."""
        if not self._file.closed:
            self._file.write("{}]\n")
            self._file.close()

    # ---- the calls ----

    def add_request(self, request: Request) -> None:
        try:
            super().add_request(request)
        except RequestTooLargeError as error:
            self._write_refused(request, error)
            raise
        self._note_added(request, None)

    def fork(self, parent_id: str, child: Request) -> None:
        try:
            super().fork(parent_id, child)
        except RequestTooLargeError as error:
            self._write_refused(child, error)
            raise
        self._note_added(child, parent_id)

    def finish_request(
        self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None
    ) -> bool:
        request = self.requests.get(request_id)
        ended = super().finish_request(request_id, status, stop_reason)
        if ended and request is not None:
            self._note_ended(request, self._next_op(), outside=True)
        return ended

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._write("i", "reset_prefix_cache", args={"op": self._next_op()})

    def abort_all(self) -> list[Request]:
        aborted = super().abort_all()
        self._note_fresh_start("abort_all", aborted)
        return aborted

    def recover(self, request_ids: Iterable[str]) -> list[Request]:
        ended = super().recover(request_ids)
        self._note_fresh_start("recover", ended)
        self._show(
            (r for r in self.requests.values() if self._states[r.request_id][0] != "waiting"), "waiting"
        )
        return ended

    def schedule(self) -> Batch:
        if not self.requests:
            return super().schedule()  # nothing will come of it
        started = self._now()
        rates = (self.costs.swap_bytes_per_second, self.costs.prefill_tokens_per_second)
        num_tokens = self.counters.num_scheduled_tokens
        batch = super().schedule()
        record = self._describe(batch, self.counters.num_scheduled_tokens - num_tokens)
        if rates != self._rates:
            self._rates = record["rates"] = rates
        if batch.is_empty():
            self._write_without_result(started, record)
        else:
            self._open_steps[batch.step] = (started, record)
        return batch

    def schedule_urgent(self) -> Batch | None:
        """None: a trace has one order of steps, which a replay can follow."""
        return None

    def update(
        self, batch: Batch, output: StepOutput, streamed: StreamedTokens | None = None
    ) -> list[RequestUpdate]:
        updates = super().update(batch, output, streamed)
        now = self._now()
        started, record = self._open_steps.pop(batch.step)
        op = self._next_op()
        record["ops"].append(op)
        if output.swaps_in_done is not None and output.swaps_in_done != batch.step:
            record["in_done"] = output.swaps_in_done
        begin = self._last_result if self._was_busy else max(started, self._last_result)
        self._last_result = now
        self._was_busy = bool(self.requests)
        record["s"] = round(now - begin, 7)
        self._write("X", "step", begin, tid=1, dur=now - begin, args=record)
        for update in updates:
            if update.finish_reason is not None:
                self._note_ended(update.request, op, outside=False)
        self._write_counters(now)
        return updates

    # ---- what is written ----

    def _describe(self, batch: Batch, num_tokens: int) -> dict[str, Any]:
        """A `StepRecord` as far as it is known when a step is scheduled; what is empty is left out."""
        record: dict[str, Any] = {
            "n": batch.step,
            "ops": [self._next_op()],
            "crc": checksum(batch, num_tokens),
            "tokens": num_tokens,
            "requests": len(batch.requests),
            "running": len(self.running),
            "waiting": len(self.waiting) + len(self.forks),
            "free": self.kv.num_free,
        }
        if num_tokens != len(batch.requests):
            record["chunks"] = [
                (w.request_id, w.start, w.num_tokens) for w in batch.requests if w.num_tokens > 1
            ]
        if len(batch.requests) != len(self.running):
            at_work = {work.request_id for work in batch.requests}
            idle = [request for request in self.running if request.request_id not in at_work]
            record["idle"] = [request.request_id for request in idle]
            loading = [
                r for r in idle if r.status is RequestStatus.SWAPPING_IN and r.swap_in_step == batch.step
            ]
            if loading:
                record["loading"] = [request.request_id for request in loading]
                self._show(loading, "swapping in")
        if batch.admitted:
            record["admitted"] = [admitted.request_id for admitted in batch.admitted]
            self._show((self.requests[name] for name in record["admitted"]), "running")
        if self.preempted:
            record["preempted"] = [list(each) for each in self.preempted]
            for each in self.preempted:
                name = "swapped" if each.kind == "swap" else "preempted"
                self._show([self.requests[each.request_id]], name)
        if self.refusal is not None:
            record["refusal"] = list(self.refusal)
        if batch.swaps_out or batch.swaps_in:
            record["swaps"] = [len(batch.swaps_out), len(batch.swaps_in)]
        return record

    def _write_without_result(self, started: float, record: dict[str, Any]) -> None:
        record["ops"] *= 2
        self._write("i", "step", started, tid=1, args=record)

    def _note_added(self, request: Request, parent_id: str | None) -> None:
        params = request.sampling_params
        content = self._contents.ranges(request.token_ids, request.cache_salt)
        self._known[request.request_id] = content
        args: dict[str, Any] = {
            "op": self._next_op(),
            "prompt": request.num_prompt_tokens,
            "max": params.max_tokens,
            "content": content,
        }
        optional = {
            "given": request.num_output_tokens,
            "min": params.min_tokens,
            "exact": request.ends_by_length_only,
            "priority": request.priority,
            "skip": request.skip_reading_prefix_cache,
            "parent": parent_id,
        }
        args.update((name, value) for name, value in optional.items() if value)
        self._states[request.request_id] = ("waiting", _encode(request.request_id))
        self._write("b", "waiting", id=request.request_id, args=args)

    def _note_ended(self, request: Request, op: int, *, outside: bool) -> None:
        name = request.request_id
        args = {
            "op": op,
            "reason": request.status.finish_reason,
            "output": request.num_output_tokens,
            "content": self._contents.ranges(request.token_ids, request.cache_salt, self._known.pop(name)),
        }
        if outside:
            args["outside"] = True
        self._write("e", self._states.pop(name)[0], id=name, args=args)

    def _note_fresh_start(self, name: str, ended: list[Request]) -> None:
        """A call of this name has ended these requests, and the steps under way come to nothing."""
        op = self._next_op()
        for request in ended:
            self._note_ended(request, op, outside=True)
        for started, record in self._open_steps.values():
            self._write_without_result(started, record)
        self._open_steps.clear()
        self._write("i", name, args={"op": op})

    def _write_refused(self, request: Request, error: Exception) -> None:
        self._write("i", "refused", args={"request": request.request_id, "message": str(error)})

    def _show(self, requests: Any, state: str) -> None:
        """From now on the tracks of these requests show `state`."""
        for request in requests:
            before, name = self._states[request.request_id]
            self._states[request.request_id] = state, name
            rest = f'"pid":1,"ts":{round(self._now() * 1e6)},"cat":"request","id":{name}}},\n'
            if not self._file.closed:
                self._file.write(f'{{"ph":"e","name":"{before}",{rest}{{"ph":"b","name":"{state}",{rest}')

    def _write_counters(self, now: float) -> None:
        self._steps_to_counters -= 1
        if self._steps_to_counters > 0 and self.requests:
            return
        self._steps_to_counters = _STEPS_PER_COUNTER
        waiting = len(self.waiting) + len(self.forks)
        self._write("C", "requests", now, args={"running": len(self.running), "waiting": waiting})
        self._write("C", "free blocks", now, args={"free": self.kv.num_free})

    def _next_op(self) -> int:
        self._op += 1
        return self._op

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _write(
        self, kind: str, name: str, when: float | None = None, *, dur: float | None = None, **fields: Any
    ) -> None:
        if self._file.closed:
            return
        when = self._now() if when is None else when
        event: dict[str, Any] = {"ph": kind, "name": name, "pid": 1, "ts": round(when * 1e6)}
        if dur is not None:
            event["dur"] = round(dur * 1e6)
        if "id" in fields:
            event["cat"] = "request"
        event.update(fields)
        self._file.write(_encode(event) + ",\n")


def _open(path: str) -> IO[str]:
    try:
        if path.endswith(".gz"):
            opened = gzip.open(path, "wt", encoding="utf-8", compresslevel=3)  # noqa: SIM115
            file = cast("IO[str]", opened)
        else:
            file = Path(path).open("w", encoding="utf-8", buffering=_BUFFER_BYTES)  # noqa: SIM115
        file.write("[\n")
    except OSError as error:
        raise ValueError(f"the trace cannot be written to {path!r}: {error.strerror}") from error
    return file
