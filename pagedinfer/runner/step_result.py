"""What a step drew: its place on the device, and its way to the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
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


class HostTokens:
    """The host's memory for what a step draws, and when it is there.

    Args:
        memory: uint8 [`DrawnTokens.nbytes(num_rows)` or more], on the CPU, in the layout of `DrawnTokens`.
        num_rows: of the step, padding included.
        ended: recorded behind the step, whose tokens are there once it has passed; None: they are there.
    """

    def __init__(self, memory: Tensor, num_rows: int, ended: torch.cuda.Event | None) -> None:
        packed, split = memory.numpy(), 8 * num_rows
        self.token_ids: npt.NDArray[np.int64] = packed[:split].view(np.int64)
        self.logprobs: npt.NDArray[np.float32] = packed[split : split + 4 * num_rows].view(np.float32)
        self._ended = ended

    @classmethod
    def copied_from(cls, drawn: DrawnTokens) -> HostTokens:
        """Has the device copy them, behind the step."""
        num_rows = drawn.token_ids.shape[0]
        if not drawn.packed.is_cuda:
            return cls(drawn.packed, num_rows, None)
        packed = torch.empty(drawn.packed.shape, dtype=torch.uint8, pin_memory=True)
        packed.copy_(drawn.packed, non_blocking=True)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record()
        return cls(packed, num_rows, ended)

    @property
    def is_ready(self) -> bool:
        """Whether the step has ended."""
        return self._ended is None or bool(self._ended.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits for the step's end."""
        if self._ended is not None:
            self._ended.synchronize()


class StepResult:
    """The first `num_rows` rows of what a step drew, on their way to the host.

    Args:
        drawn: what it drew, on the device.
        num_rows: how many of its rows are no padding.
        best: the best tokens of each, likewise.
        prompts: see `PromptRater.rate`.
        host: where the step writes it by itself, until the result is taken; None: it has to be copied.
    """

    def __init__(
        self,
        drawn: DrawnTokens,
        num_rows: int,
        best: BestTokensOnTheWay | None = None,
        prompts: dict[str, tuple[int, list[BestTokensOnTheWay]]] | None = None,
        host: HostTokens | None = None,
    ) -> None:
        self._best = best
        self.token_ids = drawn.token_ids
        """int64 [num_rows and more], on the device; the next step may overwrite it."""
        self._prompts = prompts or {}
        self._num_rows = num_rows
        self.cache: KVCache | None = None
        """Whose swaps the result reports on."""
        self._host = host or HostTokens.copied_from(drawn)
        self._output: StepOutput | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the step has ended."""
        return self._output is not None or self._host.is_ready

    def wait(self) -> None:
        """Waits for the step's end. Unlike `result`, it may run beside the launch of another step."""
        if self._output is None:
            self._host.wait()

    def result(self) -> StepOutput:
        """Waits for the step's end."""
        if self._output is None:
            self._host.wait()
            self._output = self._take()
        return self._output

    def _take(self) -> StepOutput:
        output = StepOutput(
            self._host.token_ids[: self._num_rows].copy(),
            self._host.logprobs[: self._num_rows].copy(),
            best=None if self._best is None else self._best.result(),
            prompts={name: (first, join(pieces)) for name, (first, pieces) in self._prompts.items()},
        )
        if self.cache is not None:
            output.swaps_in_done = self.cache.swaps_in_done
        return output
