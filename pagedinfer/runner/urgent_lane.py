"""A second runner of the same model, for one urgent prompt at a time beside the steps under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from pagedinfer.engine.batch import Batch
from pagedinfer.runner.kv_cache import KVCache
from pagedinfer.runner.model_runner import ModelRunner
from pagedinfer.runner.step_result import StepResult


class UrgentLane:
    """Runs steps of one request on a stream of their own, ahead of what the GPU is doing.

    Kernels of two streams mostly take turns, since those of a large model fill the GPU. So the layers of
    other steps look at `hold` from time to time, and wait while a step is under way here. What is launched on
    the current stream later waits for the step's end. The step waits for nothing but moves of its own blocks:
    that those under way have nothing to do with its blocks is up to the scheduler.

    On a CPU it runs at once.

    Args:
        runner: of the same model and cache as the other steps' runner, with one slot.
        cache: theirs.
        hold: int32 [1] on the device, 0.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache, hold: Tensor) -> None:
        self._runner = runner
        self._cache = cache
        self._hold = hold
        self._stream: torch.cuda.Stream | None = None
        if hold.is_cuda:
            self._stream = torch.cuda.Stream(hold.device, priority=-1)  # type: ignore[no-untyped-call]

    def execute(self, batch: Batch) -> StepResult:
        """Starts a step and returns at once, as `ModelRunner.execute`."""
        with self._beside():
            # Nobody is held up while this step waits for a move, which may wait for those.
            self._cache.move(batch)
            self._hold.fill_(1)
            try:
                return self._runner.execute(replace(batch, swaps_out=[], swaps_in=[], copies=[]))
            finally:
                self._hold.zero_()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._hold.device).wait_stream(self._stream)

    def capture_graphs(self, sizes: list[int]) -> None:
        """Graphs of steps of these numbers of tokens, ascending; nothing may be under way."""
        self._runner.capture_forward_graphs(sizes[::-1])
        if self._stream is not None:
            torch.cuda.synchronize(self._hold.device)

    def close(self) -> None:
        """Drops the graphs; nothing may be under way."""
        self._runner.close()
