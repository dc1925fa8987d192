"""What steps that may be CUDA graphs are given by the host and give it, without a copy that it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.runner.step_result import DrawnTokens, HostTokens, StepResult

Result = TypeVar("Result")

_NUM_PLACES = 4  # more than there are steps under way at once
_ALIGNMENT = 4  # elements: a place begins at a multiple of 16 bytes


class StepRing:
    """A ring of places in the host's memory, pinned beside a GPU, of which each step has the next.

    The host fills a place and launches the step, whose `read` and `write` find the same place by a count of
    steps that the device keeps. A place serves another step once its last one's result has been taken.

    Args:
        max_rows: of a step.
        num_extra: elements that a step may be given besides 3 for each row.
        device: of the steps.
    """

    def __init__(self, max_rows: int, num_extra: int, device: torch.device) -> None:
        pinned = device.type == "cuda"

        def ring(width: int) -> Tensor:
            width = -(-max(1, width) // _ALIGNMENT) * _ALIGNMENT
            return torch.zeros((_NUM_PLACES, width), dtype=torch.int32, pin_memory=pinned)

        self._inputs = ring(3 * max_rows + num_extra)
        self._drawn = ring(DrawnTokens.nbytes(max_rows) // 4)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = [
            Place(inputs, drawn, pinned) for inputs, drawn in zip(self._inputs, self._drawn, strict=True)
        ]
        self._num_launched = 0
        self._is_sure = True  # whether the device is known to count as many
        if pinned:  # which loads the kernels: a graph's capture cannot
            self.read(torch.empty(0, dtype=torch.int32, device=device))
            self.write(DrawnTokens(0, device))
            self._turn.zero_()

    def next_place(self) -> Place:
        """For the step that `launch` comes to next. It may have to wait for the one that had it before."""
        if not self._is_sure:
            self._num_launched = int(self._turn.item())
            self._is_sure = True
        place = self._places[self._num_launched % _NUM_PLACES]
        place.vacate()
        return place

    def launch(self, start: Callable[[], Result]) -> Result:
        """Has `start` launch a step, and returns what `start` returns."""
        self._is_sure = False  # until it has: an error, or Ctrl-C, may come before or after the launch
        result = start()
        self._num_launched += 1
        self._is_sure = True
        return result

    def read(self, out: Tensor) -> None:
        """The step's first act: what it is given, int32 [as many as it wants]."""
        ops.read_ring(self._inputs, self._turn, out)

    def write(self, drawn: DrawnTokens) -> None:
        """The step's last act."""
        ops.write_ring(drawn.packed.view(torch.int32), self._turn, self._drawn)


class Place:
    """One step's part of a ring.

    Args:
        inputs: int32 [width], what the step is given.
        drawn: int32 [width], in which it leaves what it draws, in the layout of `DrawnTokens`.
        pinned: beside a GPU.
    """

    def __init__(self, inputs: Tensor, drawn: Tensor, pinned: bool) -> None:
        self._inputs: npt.NDArray[np.int32] = inputs.numpy()
        self._drawn = drawn.view(torch.uint8)
        self._ended: torch.cuda.Event | None = None
        if pinned:
            self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._of_sizes: dict[int, PlaceOfRows] = {}
        self._result: StepResult | None = None

    def of(self, size: int) -> PlaceOfRows:
        """For a step of so many rows."""
        if size not in self._of_sizes:
            self._of_sizes[size] = PlaceOfRows(size, self._inputs, HostTokens(self._drawn, size, self._ended))
        return self._of_sizes[size]

    def occupy(self, result: StepResult) -> None:
        """The step that has this place has been launched, and this is who takes its tokens from there."""
        if self._ended is not None:
            self._ended.record()
        self._result = result

    def vacate(self) -> None:
        """Has the result of the step that had this place keep what it drew. May have to wait for it."""
        if self._result is not None:
            self._result.result()
            self._result = None  # not before: Ctrl-C may end the wait


class PlaceOfRows:
    """A place as a step of a certain size has it."""

    def __init__(self, size: int, inputs: npt.NDArray[np.int32], tokens: HostTokens) -> None:
        self.rows = inputs[: 3 * size].reshape(3, size)
        """int32 [3, size]: what a step is given first, to be filled."""
        self.extra = inputs[3 * size :]
        """int32 [`num_extra` or more]: what follows."""
        self.tokens = tokens
        """Where it writes what it draws."""
