"""Where the host's time of a step goes, part by part, from timers put around the engine's own methods.

schedule: the scheduler; prepare: the input arrays of a step; launch: the rest of starting it; wait: for what
it drew; update: the scheduler's; outputs: texts and what users get. `step` is the time from one step's end to
the next one's, and `other` what of it is none of these.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

PARTS = ("schedule", "prepare", "launch", "wait", "update", "outputs")


class StepProfile:
    """Times every step of an engine from now on; `clear` between two workloads."""

    def __init__(self, engine: Any) -> None:
        self.clear()
        runner = engine.worker._runner
        self._wrap(engine.scheduler, "schedule", "schedule")
        self._wrap(runner._inputs, "pack_decodes", "prepare")
        self._wrap(runner._inputs, "prepare", "prepare")
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
        self._steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._last_end: float | None = None

    def table(self) -> list[dict[str, Any]]:
        """Medians in microseconds for decodes alone and for other steps, by the number of requests."""
        groups: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
        for step in self._steps:
            requests = int(step["requests"])
            kind = "decode" if step["tokens"] == requests else "mixed"
            groups[kind, 1 << max(0, requests - 1).bit_length()].append(step)
        rows = []
        for (kind, size), steps in sorted(groups.items()):
            row: dict[str, Any] = {"kind": kind, "requests up to": size, "steps": len(steps)}
            row["seconds"] = sum(step["step"] for step in steps)
            for part in (*PARTS, "other", "step"):
                row[part] = 1e6 * float(np.median([step[part] for step in steps]))
            rows.append(row)
        return rows

    def print_table(self) -> None:
        """Prints it."""
        columns = (*PARTS, "other", "step")
        print(
            "    steps of         number  seconds  " + "".join(f"{part:>10}" for part in columns) + "  (us)"
        )
        for row in self.table():
            print(
                f"    {row['kind']:>6} <= {row['requests up to']:<5}{row['steps']:8}{row['seconds']:9.2f}  "
                + "".join(f"{row[part]:10.0f}" for part in columns),
                flush=True,
            )

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
            self._now["requests"] = len(batch.requests)
            self._now["tokens"] = batch.num_tokens
            prepared = self._now["prepare"]
            begin = time.perf_counter()
            handle = execute(batch)
            self._now["launch"] += time.perf_counter() - begin - (self._now["prepare"] - prepared)
            return _TimedHandle(handle, self._now)

        worker.execute = timed

    def _end_step(self) -> None:
        now = time.perf_counter()
        if self._last_end is not None and "requests" in self._now:
            step = {part: self._now[part] for part in (*PARTS, "requests", "tokens")}
            step["step"] = now - self._last_end
            step["other"] = step["step"] - sum(step[part] for part in PARTS)
            self._steps.append(step)
        self._last_end = now
        self._now.clear()


class _TimedHandle:
    def __init__(self, handle: Any, now: dict[str, float]) -> None:
        self._handle, self._now = handle, now

    def result(self) -> Any:
        begin = time.perf_counter()
        output = self._handle.result()
        self._now["wait"] += time.perf_counter() - begin
        return output
