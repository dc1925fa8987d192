"""What a step drew: its place on the device, and its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedinfer.engine.batch import StepOutput
from pagedinfer.runner.best_tokens import BestTokensOnTheWay, join
from pagedinfer.runner.kv_cache import KVCache


class DrawnTokens:
    """Device memory for the tokens of a step and their log-probabilities, in one piece.

    Args:
        num_rows: of the step, padding included.
        memory: uint8, at least `nbytes(num_rows)` of it, aligned to 8 bytes; allocated if not given.
    """

    def __init__(self, num_rows: int, device: torch.device, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = torch.empty(self.nbytes(num_rows), dtype=torch.uint8, device=device)
        self.packed = memory[: self.nbytes(num_rows)]
        self.token_ids = self.packed[: 8 * num_rows].view(torch.int64)  # [num_rows]
        self.logprobs = self.packed[8 * num_rows :].view(torch.float32)  # [num_rows]

    @staticmethod
    def nbytes(num_rows: int) -> int:
        """Bytes that so many rows take."""
        return (8 + 4) * num_rows


class StepResult:
    """The first `num_rows` rows of what a step drew, on their way to the host.

    `best`: the best tokens of each, likewise; `prompts`: see `PromptRater.rate`.
    """

    def __init__(
        self,
        drawn: DrawnTokens,
        num_rows: int,
        best: BestTokensOnTheWay | None = None,
        prompts: dict[str, tuple[int, list[BestTokensOnTheWay]]] | None = None,
    ) -> None:
        self._best = best
        self.token_ids = drawn.token_ids
        """int64 [num_rows and more], on the device; the next step may overwrite it."""
        self._prompts = prompts or {}
        self._num_rows = num_rows
        self._num_padded_rows = drawn.token_ids.shape[0]
        self.cache: KVCache | None = None
        """Whose swaps the result reports on."""
        self._ready: torch.cuda.Event | None = None
        if drawn.packed.is_cuda:
            self._packed = torch.empty(drawn.packed.shape, dtype=torch.uint8, pin_memory=True)
            self._packed.copy_(drawn.packed, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()
        else:
            self._packed = drawn.packed.clone()  # the step's memory may be the next step's

    @property
    def is_ready(self) -> bool:
        """Whether the step has ended."""
        return self._ready is None or bool(self._ready.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits for the step's end. Unlike `result`, it may run beside the launch of another step."""
        if self._ready is not None:
            self._ready.synchronize()

    def result(self) -> StepOutput:
        """Waits for the step's end."""
        self.wait()
        split = 8 * self._num_padded_rows
        packed = self._packed.numpy()
        output = StepOutput(
            packed[:split].view("int64")[: self._num_rows],
            packed[split:].view("float32")[: self._num_rows],
            best=None if self._best is None else self._best.result(),
            prompts={name: (first, join(pieces)) for name, (first, pieces) in self._prompts.items()},
        )
        if self.cache is not None:
            output.swaps_in_done = self.cache.swaps_in_done
        return output
