"""The lane's part of a step: in which order what happens, whatever becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedinfer.engine.batch import Batch
from pagedinfer.runner.urgent_lane import UrgentLane


class Recorder:
    """A cache and a runner that note what is called, and what `hold` is then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.hold = torch.zeros(1, dtype=torch.int32)
        self.events: list[tuple[str, int, Batch]] = []
        self._error = error

    def move(self, batch: Batch) -> None:
        self.events.append(("move", int(self.hold), batch))

    def execute(self, batch: Batch) -> Any:
        self.events.append(("execute", int(self.hold), batch))
        if self._error is not None:
            raise self._error
        return "result"


def lane_on(recorder: Recorder) -> UrgentLane:
    return UrgentLane(recorder, recorder, recorder.hold)  # type: ignore[arg-type]


def test_nobody_is_held_up_while_blocks_are_moved() -> None:
    """The moves may wait for the very steps that would be held up."""
    recorder = Recorder()
    batch = Batch(7, swaps_out=[(3, 5)])
    assert lane_on(recorder).execute(batch) == "result"
    (moved, hold_then, first), (executed, hold, second) = recorder.events
    assert (moved, hold_then, first.swaps_out) == ("move", 0, [(3, 5)])
    assert (executed, hold, second.swaps_out, second.step) == ("execute", 1, [], 7)
    assert recorder.hold.item() == 0
    assert batch.swaps_out == [(3, 5)]


def test_a_step_that_fails_holds_nobody_up() -> None:
    recorder = Recorder(RuntimeError("no such thing"))
    with pytest.raises(RuntimeError, match="no such thing"):
        lane_on(recorder).execute(Batch(7))
    assert recorder.hold.item() == 0
