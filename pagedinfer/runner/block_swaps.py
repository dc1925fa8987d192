"""Blocks between the device and the CPU, beside the steps rather than in their way."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import Batch
from pagedinfer.runner.upload import pairs

Pairs = Sequence[tuple[int, int]]


class _Timing:
    """How long some work takes, on the device's own clock where that works on by itself."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self._on_gpu = device.type == "cuda"
        self._marks = [self._mark()]

    def stop(self) -> None:
        self._marks.append(self._mark())

    @property
    def is_over(self) -> bool:
        end = self._marks[1]
        return isinstance(end, float) or bool(end.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """Waits for its end."""
        begin, end = self._marks
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000.0
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin

    def _mark(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class BlockSwaps:
    """Carries out the swaps of batches; on a GPU on a stream of its own.

    That stream first waits for all that the steps so far do. A step waits for a swap out only if it is given
    one of the blocks that are being read, and for its own swaps in, since it reads those blocks. All swaps
    are in order among themselves, so the CPU's blocks need no watch.

    Args:
        blocks: [num_blocks, ...] on the device.
        cpu_blocks: [num_cpu_blocks, ...]; pinned beside a GPU.
    """

    def __init__(self, blocks: Tensor, cpu_blocks: Tensor) -> None:
        self._blocks = blocks
        self._cpu_blocks = cpu_blocks
        self._timings: list[_Timing] = []
        self._stream: torch.cuda.Stream | None = None
        if blocks.is_cuda:
            self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._leaving: dict[int, torch.cuda.Event] = {}  # block that is read by a swap out: when that ends

    def take_timings(self) -> list[tuple[int, float]]:
        """(blocks, seconds) of the swaps that have ended since the last call, each one way."""
        over = [timing for timing in self._timings if timing.is_over]
        self._timings = [timing for timing in self._timings if not timing.is_over]
        return [(timing.num_blocks, timing.seconds()) for timing in over]

    def start(self, batch: Batch) -> None:
        """Begins a batch's swaps, before anything else of its step."""
        if self._stream is None:
            self._swap(self._blocks, self._cpu_blocks, batch.swaps_out)
            self._swap(self._cpu_blocks, self._blocks, batch.swaps_in)
        elif batch.swaps_out or batch.swaps_in or self._leaving:
            self._start_beside(batch, self._stream)

    def _start_beside(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(self._blocks.device)
        given = _given_blocks(batch)
        # What this step needs goes first, and then what only makes room for later ones.
        fetched = {cpu_block for cpu_block, _ in batch.swaps_in}
        needed = [pair for pair in batch.swaps_out if pair[0] in given or pair[1] in fetched]
        others = [pair for pair in batch.swaps_out if not (pair[0] in given or pair[1] in fetched)]
        if batch.swaps_out or batch.swaps_in:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._swap_out(needed)
            arrived = self._swap(self._cpu_blocks, self._blocks, batch.swaps_in)
            self._swap_out(others)
        for event in {id(event): event for block, event in self._leaving.items() if block in given}.values():
            current.wait_event(event)
        if arrived is not None:
            current.wait_event(arrived)
        for block in [block for block in self._leaving if block in given]:
            del self._leaving[block]
        if all(event.query() for event in self._leaving.values()):  # type: ignore[no-untyped-call]
            self._leaving.clear()

    def _swap_out(self, mapping: Pairs) -> None:
        event = self._swap(self._blocks, self._cpu_blocks, mapping)
        if event is not None:
            self._leaving.update((block, event) for block, _ in mapping)

    def _swap(self, source: Tensor, destination: Tensor, mapping: Pairs) -> torch.cuda.Event | None:
        """Swaps on the current stream; on a GPU the event of its end, if there was anything to do."""
        if not mapping:
            return None
        timing = _Timing(len(mapping), self._blocks.device)
        ops.swap_blocks(source, destination, pairs(mapping))
        timing.stop()
        self._timings.append(timing)
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def _given_blocks(batch: Batch) -> set[int]:
    """The blocks that a step may write to and that were somebody else's before it."""
    given = {block for _, block in batch.swaps_in}
    given.update(block for _, block in batch.copies)
    for admitted in batch.admitted:
        given.update(admitted.block_ids)
    for request in batch.requests:
        given.update(request.new_block_ids)
    return given
