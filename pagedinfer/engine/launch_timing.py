"""When to launch a step behind the one that the device computes: as late as keeps the device busy.

A step that is launched early hides what the host does between two steps; but an urgent request that comes
then waits for two steps instead of one. Launched just before the device is done, it does only the first.
"""

from __future__ import annotations

import time

from pagedinfer.engine.batch import Batch

_GRAIN = 32  # tokens: steps that differ by less are taken to last as long
_MARGIN = 0.5e-3  # seconds before the device is done, besides what a launch takes
_LATE = 0.1e-3  # whoever waited less for a result came late: the step was over before
_SHRINK = 0.97  # of an expected duration that may be too long
_MEMORY = 0.5  # how much of an old measurement survives a new one


class LaunchTiming:
    """Learns how long steps and launches take."""

    def __init__(self) -> None:
        self._durations: dict[int, float] = {}  # seconds, by the size of a step
        self._launch_seconds = 0.0

    def observe_launch(self, seconds: float) -> None:
        """Scheduling a step and launching it took the host so long."""
        self._launch_seconds += (1 - _MEMORY) * (seconds - self._launch_seconds)

    def observe_step(self, batch: Batch, seconds: float, waited: float) -> None:
        """A step took the device at most so long, for the last `waited` seconds of which the host waited."""
        size = _size(batch)
        expected = self._durations.get(size)
        if expected is None:
            expected = seconds
        elif waited < _LATE:
            expected = _SHRINK * min(expected, seconds)
        else:
            expected += (1 - _MEMORY) * (seconds - expected)
        self._durations[size] = expected

    def seconds_until_launch(self, batch: Batch, started_at: float) -> float | None:
        """How long the launch of the next step can wait, while this one runs; None: nobody knows."""
        expected = self._durations.get(_size(batch))
        if expected is None:
            return None
        due = started_at + expected - self._launch_seconds - _MARGIN
        return max(0.0, due - time.perf_counter())


def _size(batch: Batch) -> int:
    return -(-batch.num_tokens // _GRAIN)
