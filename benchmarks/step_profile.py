"""Where the host's time of a step goes, part by part, from timers put around the engine's own methods.

schedule: the scheduler; prepare: the input arrays of a step; launch: the rest of starting it; wait: for what
it drew; update: the scheduler's; outputs: texts and what users get. `step` is the time from one step's end to
the next one's, less what this file does in between; `host` is all of it but the wait, and `other` what of
that is none of these. `idle` is how long the GPU had nothing to do before the step, by its own clock. When
steps overlap, results are awaited after the next launch: a row has the schedule, prepare and launch of the
step launched meanwhile.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

PARTS = ("schedule", "prepare", "launch", "wait", "update", "outputs")
COLUMNS = (*PARTS, "other", "host", "step", "idle")


class StepProfile:
    """Times every step of an engine from now on; `clear` between two workloads."""

    def __init__(self, engine: Any) -> None:
        self.clear()
        self._finished: _Launch | None = None  # the step whose results came last
        runner = engine.worker._runner
        self._wrap(engine.scheduler, "schedule", "schedule")
        self._wrap(runner._inputs, "pack_decodes", "prepare")
        self._wrap(runner._inputs, "send", "prepare")
        self._wrap(engine.scheduler, "update", "update")
        self._wrap(engine._outputs, "process", "outputs")
        self._wrap_execute(engine.worker)
        step = engine.step

        def timed_step() -> Any:
            result = step()
            self._end_step()
            return result

        engine.step = timed_step

    def clear(self) -> None:
        """Forgets what was measured."""
        self._steps: list[tuple[dict[str, float], _Launch, _Launch | None]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._last_end: float | None = None
        self._last_launch: _Launch | None = None

    def table(self) -> list[dict[str, Any]]:
        """Medians in microseconds for decodes alone and for other steps, by the number of requests."""
        groups: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
        for step, launch, before in self._steps:
            step["idle"] = launch.idle_since(before)
            requests = int(step["requests"])
            kind = "decode" if step["tokens"] == requests else "mixed"
            groups[kind, 1 << max(0, requests - 1).bit_length()].append(step)
        rows = []
        for (kind, size), steps in sorted(groups.items()):
            row: dict[str, Any] = {"kind": kind, "requests up to": size, "steps": len(steps)}
            row["seconds"] = sum(step["step"] for step in steps)
            row["idle seconds"] = sum(step["idle"] for step in steps)
            for part in COLUMNS:
                row[part] = 1e6 * float(np.median([step[part] for step in steps]))
            rows.append(row)
        return rows

    def print_table(self) -> None:
        """Prints it."""
        print(
            "    steps of         number  seconds   idle  "
            + "".join(f"{part:>10}" for part in COLUMNS)
            + "  (us)"
        )
        table = self.table()
        for row in table:
            print(
                f"    {row['kind']:>6} <= {row['requests up to']:<5}{row['steps']:8}{row['seconds']:9.2f}"
                f"{row['idle seconds']:7.3f}  " + "".join(f"{row[part]:10.0f}" for part in COLUMNS),
                flush=True,
            )
        seconds, idle = (sum(row[name] for row in table) for name in ("seconds", "idle seconds"))
        if seconds:
            print(f"    the device was idle for {100 * idle / seconds:.1f} % of {seconds:.2f} s", flush=True)

    def _wrap(self, owner: Any, method: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            self._now[part] += time.perf_counter() - begin
            return result

        setattr(owner, method, timed)

    def _wrap_execute(self, worker: Any) -> None:
        execute = worker.execute

        def timed(batch: Any) -> Any:
            entered = time.perf_counter()
            launch = _Launch(len(batch.requests), batch.num_tokens)
            prepared = self._now["prepare"]
            begin = time.perf_counter()
            handle = execute(batch)
            end = time.perf_counter()
            launch.ends()
            self._now["launch"] += end - begin - (self._now["prepare"] - prepared)
            self._now["profiling"] += begin - entered + time.perf_counter() - end
            return _TimedHandle(handle, launch, self._result)

        worker.execute = timed

    def _result(self, handle: Any, launch: _Launch) -> Any:
        begin = time.perf_counter()
        output = handle.result()
        self._now["wait"] += time.perf_counter() - begin
        self._finished = launch
        return output

    def _end_step(self) -> None:
        now = time.perf_counter()
        launch, self._finished = self._finished, None
        if launch is not None:
            if self._last_end is not None:
                step = {part: self._now[part] for part in PARTS}
                step |= {"requests": launch.requests, "tokens": launch.tokens}
                step["step"] = now - self._last_end
                step["host"] = step["step"] - step["wait"] - self._now["profiling"]
                step["other"] = step["host"] - sum(step[part] for part in PARTS if part != "wait")
                self._steps.append((step, launch, self._last_launch))
            self._last_launch = launch
        self._now.clear()
        self._last_end = time.perf_counter()


class _Launch:
    """What a step holds, and on a GPU when it begins and ends there."""

    def __init__(self, requests: int, tokens: int) -> None:
        self.requests, self.tokens = requests, tokens
        self._begin, self._end = (
            torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None for _ in range(2)
        )
        if self._begin is not None:
            self._begin.record()

    def ends(self) -> None:
        if self._end is not None:
            self._end.record()

    def idle_since(self, before: _Launch | None) -> float:
        """Seconds from the end of the step before to the beginning of this one; 0 without a GPU."""
        if before is None or before._end is None or self._begin is None:
            return 0.0
        self._begin.synchronize()
        return before._end.elapsed_time(self._begin) / 1000


class _TimedHandle:
    def __init__(self, handle: Any, launch: _Launch, result: Callable[[Any, _Launch], Any]) -> None:
        self._handle, self._launch, self._result = handle, launch, result

    def result(self) -> Any:
        return self._result(self._handle, self._launch)
