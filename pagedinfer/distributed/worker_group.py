"""The workers of several ranks, each in a process of its own, as one worker."""

from __future__ import annotations

from collections import deque

import torch

from pagedinfer.config import EngineConfig
from pagedinfer.distributed.channel import Kind
from pagedinfer.distributed.launch import Launch
from pagedinfer.distributed.limits import check_tensor_parallel_size
from pagedinfer.distributed.messages import BatchEncoder, Ready, decode_ready, decode_result
from pagedinfer.distributed.rank_watch import RankWatch
from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.errors import DeviceError, EngineDeadError, OutOfMemoryError, WeightsError
from pagedinfer.models.model_config import ModelConfig

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, DeviceError, OutOfMemoryError, WeightsError)
}
"""What a worker may raise while it is made: an error of the user's, not the end of an engine."""


class WorkerGroup:
    """Starts a process for each rank, and has all of them execute the batches; see `Worker`.

    The engine's own process does not touch the devices. Each batch is sent to all ranks; they draw the same
    tokens, and rank 0 sends them back.

    Raises:
        ValueError: the model cannot be divided over so many ranks; nothing has been started then.
        DeviceError: there are fewer GPUs than ranks.
        EngineDeadError: a rank has died or hangs; also from `execute`, from a step's `result`, and from then
            on always.
        Exceptions of `Worker`: what a rank's worker raised while it was made.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, *, num_known_tokens: int | None = None
    ) -> None:
        check_tensor_parallel_size(model_config, config.tensor_parallel_size)
        self._error: EngineDeadError | None = None
        self._last_step = -1
        self._encoder = BatchEncoder()
        self._in_flight: deque[RemoteStep] = deque()
        self._swap_timings: list[tuple[int, float]] = []
        self._launch = Launch(config, model_config.path, num_known_tokens)
        self.device = torch.device(self._launch.device)
        self._watch = RankWatch(self._launch.ranks)
        try:
            ready = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.max_num_seqs = ready.max_num_seqs
        self.max_num_batched_tokens = ready.max_num_batched_tokens
        self.max_model_len = ready.max_model_len
        self.num_blocks = ready.num_blocks
        self.num_cpu_blocks = ready.num_cpu_blocks
        self.block_bytes = ready.block_bytes
        """Bytes of each rank's part of a block."""
        self.dtype: torch.dtype = getattr(torch, ready.dtype)
        self.cascade_attention = ready.cascade_attention
        self.urgent_lane = None
        """The ranks have none: what they tell each other has one order."""

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes on this machine."""
        return [rank.process.pid for rank in self._launch.ranks if rank.process is not None]

    def execute(self, batch: Batch) -> RemoteStep:
        """Has all ranks start a step; see `ModelRunner.execute`."""
        self._check_alive()
        contents = self._encoder.encode(batch)
        self._last_step = batch.step
        for rank in self._launch.ranks:
            try:
                rank.data.send(Kind.STEP, contents)
            except OSError:
                self._fail(self._watch.why_unreachable(rank, batch.step))
        step = RemoteStep(self, batch.step)
        self._in_flight.append(step)
        return step

    def take_swap_timings(self) -> list[tuple[int, float]]:
        """See `KVCache.take_swap_timings`; those of rank 0."""
        timings, self._swap_timings = self._swap_timings, []
        return timings

    def check_device(self) -> None:
        """Raises EngineDeadError if the ranks have ended."""
        self._check_alive()

    def close(self) -> None:
        """Ends all ranks. Harmless when repeated."""
        if self._error is None:
            self._error = EngineDeadError("this engine has been closed")
            self._watch.close()
            self._launch.end()

    def wait_for(self, step: RemoteStep) -> StepOutput:
        """Waits until rank 0 has sent what a step drew."""
        self._watch.begin_wait()
        while step.output is None:
            self._check_alive()
            try:
                arrived = self._watch.wait(self._last_step)
            except EngineDeadError as error:
                self._fail(error)
            for _, (kind, contents) in arrived:
                if kind == Kind.RESULT:
                    self._take_result(contents)
        return step.output

    def _take_result(self, contents: bytes) -> None:
        number, output, swap_timings = decode_result(contents)
        step = self._in_flight.popleft()  # rank 0 executes them in the order in which it gets them
        assert step.number == number
        step.output = output
        self._swap_timings += swap_timings

    def _wait_until_ready(self) -> Ready:
        waiting = {rank.number for rank in self._launch.ranks}
        while waiting:
            try:
                arrived = self._watch.wait(-1)
            except EngineDeadError as error:
                cause = self._watch.first_cause()
                if cause is None or cause.kind not in _ERRORS:
                    raise
                raise _ERRORS[cause.kind](cause.message) from error
            for rank, (kind, contents) in arrived:
                if kind == Kind.READY:
                    waiting.discard(rank.number)
                    ready = decode_ready(contents)
        return ready

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))

    def _fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._watch.close()
        self._launch.end(0.0)
        raise error


class RemoteStep:
    """A step under way in the ranks."""

    def __init__(self, workers: WorkerGroup, number: int) -> None:
        self._workers = workers
        self.number = number
        self.output: StepOutput | None = None
        """What it drew, once that has arrived."""

    @property
    def is_ready(self) -> bool:
        """Whether that has arrived."""
        return self.output is not None

    def result(self) -> StepOutput:
        """Waits for the step's end.

        Raises:
            EngineDeadError: a rank has died or hangs.
        """
        return self._workers.wait_for(self)
