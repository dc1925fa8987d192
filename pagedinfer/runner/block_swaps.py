"""Blocks between the device and the CPU, beside the steps rather than in their way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import Batch
from pagedinfer.runner.upload import pairs

Pairs = Sequence[tuple[int, int]]

_PIECE_BYTES = 128 << 20  # of a swap that nothing waits for yet: some milliseconds until its blocks are free


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


class _Moves:
    """Moves in one direction on a stream of their own, and which blocks they are reading and writing."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # By block: when what is under way with it ends.
        self.reading: dict[int, torch.cuda.Event] = {}
        self.writing: dict[int, torch.cuda.Event] = {}

    def add(self, mapping: Pairs, end: torch.cuda.Event) -> None:
        for source, destination in mapping:
            self.reading[source] = end
            self.writing[destination] = end

    def forget_ended(self) -> None:
        ended = {event for event in set(self.reading.values()) if event.query()}  # type: ignore[no-untyped-call]
        if ended:
            self.reading = {block: event for block, event in self.reading.items() if event not in ended}
            self.writing = {block: event for block, event in self.writing.items() if event not in ended}


class BlockSwaps:
    """Carries out the swaps of batches; on a GPU beside the steps, each direction on a stream of its own.

    A swap first waits for all that the steps so far do, and for what the other direction is doing with its
    blocks. A step waits for a swap only if it uses one of its blocks: one that is being read and is given
    away, or one that is being written.

    Args:
        blocks: [num_blocks, ...] on the device.
        cpu_blocks: [num_cpu_blocks, ...]; pinned beside a GPU.
    """

    def __init__(self, blocks: Tensor, cpu_blocks: Tensor) -> None:
        self._blocks = blocks
        self._cpu_blocks = cpu_blocks
        self._timings: list[_Timing] = []
        self._step = 0
        self._arrivals: deque[tuple[int, torch.cuda.Event]] = deque()  # steps, and when their swaps in end
        self._directions: tuple[_Moves, _Moves] | None = None  # out, in
        if blocks.is_cuda:
            self._directions = (_Moves(blocks.device), _Moves(blocks.device))

    @property
    def swaps_in_done(self) -> int:
        """The last step whose swaps in, and all before, have ended by now."""
        while self._arrivals and self._arrivals[0][1].query():  # type: ignore[no-untyped-call]
            self._arrivals.popleft()
        return self._arrivals[0][0] - 1 if self._arrivals else self._step

    def take_timings(self) -> list[tuple[int, float]]:
        """(blocks, seconds) of the swaps that have ended since the last call, each one way."""
        over = [timing for timing in self._timings if timing.is_over]
        self._timings = [timing for timing in self._timings if not timing.is_over]
        return [(timing.num_blocks, timing.seconds()) for timing in over]

    def start(self, batch: Batch) -> None:
        """Begins a batch's swaps, before anything else of its step."""
        self._step = batch.step
        if self._directions is None:
            self._swap(self._blocks, self._cpu_blocks, batch.swaps_out)
            self._swap(self._cpu_blocks, self._blocks, batch.swaps_in)
            return
        leaving, arriving = self._directions
        if batch.swaps_out or batch.swaps_in or leaving.reading or arriving.reading:
            self._start_beside(batch, leaving, arriving)

    def _start_beside(self, batch: Batch, leaving: _Moves, arriving: _Moves) -> None:
        leaving.forget_ended()
        arriving.forget_ended()
        used = _used_blocks(batch)
        # What this step needs goes first, and then what only makes room for later ones.
        targets = used.union(block for _, block in batch.swaps_in)
        fetched = {cpu_block for cpu_block, _ in batch.swaps_in}
        needed = [pair for pair in batch.swaps_out if pair[0] in targets or pair[1] in fetched]
        others = [pair for pair in batch.swaps_out if not (pair[0] in targets or pair[1] in fetched)]
        self._swap_out(needed, leaving, arriving)
        if batch.swaps_in:
            end = self._move(self._cpu_blocks, self._blocks, batch.swaps_in, arriving, leaving)
            self._arrivals.append((batch.step, end))
        # Free blocks are handed out from the end of a sequence, so its end should be free first.
        size = max(1, _PIECE_BYTES // max(1, self._blocks[0].nbytes))
        for stop in range(len(others), 0, -size):
            self._swap_out(others[max(0, stop - size) : stop], leaving, arriving)
        current = torch.cuda.current_stream(self._blocks.device)
        _wait(current, (leaving.reading, arriving.writing), used)

    def _swap_out(self, mapping: Pairs, leaving: _Moves, arriving: _Moves) -> None:
        if mapping:
            self._move(self._blocks, self._cpu_blocks, mapping, leaving, arriving)

    def _move(
        self, source: Tensor, destination: Tensor, mapping: Pairs, moves: _Moves, opposite: _Moves
    ) -> torch.cuda.Event:
        """Begins one move on its direction's stream; the event of its end."""
        moves.stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        _wait(moves.stream, (opposite.writing,), (block for block, _ in mapping))
        _wait(moves.stream, (opposite.reading,), (block for _, block in mapping))
        with torch.cuda.stream(moves.stream):
            self._swap(source, destination, mapping)
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
        moves.add(mapping, end)
        return end

    def _swap(self, source: Tensor, destination: Tensor, mapping: Pairs) -> None:
        """Swaps on the current stream."""
        if mapping:
            timing = _Timing(len(mapping), self._blocks.device)
            ops.swap_blocks(source, destination, pairs(mapping))
            timing.stop()
            self._timings.append(timing)


def _wait(
    stream: torch.cuda.Stream, under_way: Iterable[dict[int, torch.cuda.Event]], blocks: Iterable[int]
) -> None:
    """Has `stream` wait for what is under way with these blocks."""
    blocks = list(blocks)
    for event in {ends[block] for ends in under_way for block in blocks if block in ends}:
        stream.wait_event(event)


def _used_blocks(batch: Batch) -> set[int]:
    """The blocks that a step reads or writes and that were not its requests' before it."""
    used = {block for pair in batch.copies for block in pair}
    for admitted in batch.admitted:
        used.update(admitted.block_ids)
    for request in batch.requests:
        used.update(request.new_block_ids)
    return used
