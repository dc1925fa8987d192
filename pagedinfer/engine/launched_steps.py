"""Steps that the device has been given and whose results the host has not taken in yet."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from pagedinfer.engine.batch import Batch, StepHandle, StepOutput


@dataclass(slots=True, eq=False)
class _LaunchedStep:
    batch: Batch
    handle: StepHandle
    launched_at: float
    num_tokens: int
    aborted: list[str] = field(default_factory=list)  # request ids, since the launch


class _FailedLaunch:
    """In place of the handle of a step whose launch has raised: its result raises the same."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error
        self.is_ready = True

    def result(self) -> StepOutput:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # it refers to this frame, and to all that the step had on the device


class LaunchedSteps:
    """A queue of steps, the oldest first; the device computes them in this order."""

    def __init__(self) -> None:
        self._steps: deque[_LaunchedStep] = deque()
        self._last_result_at = 0.0
        self.waited = 0.0
        """Seconds for which the last result was waited for."""
        self.num_tokens = 0
        """What the step of the last result computed. Counted at its launch, when its requests are in the
        CPU's caches anyway."""

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, batch: Batch, handle: StepHandle) -> None:
        """A step has just been launched."""
        self._steps.append(_LaunchedStep(batch, handle, time.perf_counter(), batch.num_tokens))

    def append_failed(self, batch: Batch, error: Exception) -> None:
        """The launch of a step has raised, which is the business of those who look at its result.

        The steps before it come first, and there must be none behind it.
        """
        self.append(batch, _FailedLaunch(error))

    @property
    def has_failed(self) -> bool:
        """Whether the newest one could not be launched."""
        return bool(self._steps) and isinstance(self._steps[-1].handle, _FailedLaunch)

    @property
    def is_ready(self) -> bool:
        """Whether there is a next result that need not be waited for."""
        return bool(self._steps) and self._steps[0].handle.is_ready

    @property
    def oldest(self) -> Batch:
        """The batch of the step whose result comes next."""
        return self._steps[0].batch

    @property
    def oldest_started_at(self) -> float:
        """When the device began with it, on the clock of `time.perf_counter`."""
        return max(self._steps[0].launched_at, self._last_result_at)

    def note_abort(self, request_id: str) -> None:
        """What the steps say of this request is nobody's any more, not even a later one's of its name."""
        for step in self._steps:
            step.aborted.append(request_id)

    def take_result(self) -> tuple[Batch, StepOutput, float]:
        """Waits for the oldest step: its batch, what it gave, and how many seconds the device took."""
        started_at = self.oldest_started_at
        step = self._steps.popleft()
        asked_at = time.perf_counter()
        output = step.handle.result()
        for request_id in step.aborted:
            output.prompts.pop(request_id, None)
        now = self._last_result_at = time.perf_counter()
        self.waited = now - asked_at
        self.num_tokens = step.num_tokens
        return step.batch, output, now - started_at

    def clear(self) -> None:
        """Forgets the steps. What the device still does for them, it does before anything launched later."""
        self._steps.clear()
