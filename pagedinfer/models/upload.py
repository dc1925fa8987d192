"""Copies tensors from files to where they belong, on a GPU several at a time and through pinned memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedinfer.models.checkpoint import FilePlace

_STAGE_BYTES = 16 << 20
_MOST_THREADS = 12
_MOST_BYTES_UNDER_WAY = 512 << 20


class Uploader:
    """Fills destinations on one device from tensors of the CPU; a context manager.

    On the CPU a copy is made at once. On a GPU, threads bring the sources piece by piece into pinned memory
    of their own, and the copy engines take it from there: getting at a file's bytes, on disk or in the page
    cache, is more than one thread's work at the speed of PCIe. The host holds the staging memory (threads x 2
    x 16 MiB) and, of sources that are no mapped files, up to 512 MiB and one tensor more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: deque[tuple[list[Future[None]], int]] = deque()
        self._bytes_under_way = 0
        self._lanes: list[_Lane] = []
        self._local = threading.local()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what the destinations' memory was used for before
            threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")

    def copy(self, source: Tensor, destination: Tensor, place: FilePlace | None = None) -> None:
        """Copies, or starts to; both have one shape. `place` is where the source's bytes are in a file."""
        if self._pool is None:
            destination.copy_(source)
            return
        if source.dim() == 0:
            source, destination = source[None], destination[None]
        rows = max(1, _STAGE_BYTES // max(1, source[:1].nbytes))
        pieces = zip(source.split(rows), destination.split(rows), strict=True)  # type: ignore[no-untyped-call]
        futures = [self._pool.submit(self._copy_piece, *pair, place) for pair in pieces]
        self._under_way.append((futures, source.nbytes))
        self._bytes_under_way += source.nbytes
        self._wait(_MOST_BYTES_UNDER_WAY)

    def finish(self) -> None:
        """Waits until all sources have been read, so that they may be closed."""
        self._wait(0)

    def _wait(self, most_bytes: int) -> None:
        """Waits until at most so many bytes of sources are still to be read."""
        while self._under_way and self._bytes_under_way > most_bytes:
            futures, num_bytes = self._under_way.popleft()
            for future in futures:
                future.result()
            self._bytes_under_way -= num_bytes

    @torch.inference_mode()  # a thread's own; destinations may have been made in that mode
    def _copy_piece(self, source: Tensor, destination: Tensor, place: FilePlace | None) -> None:
        lane = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = _Lane(self._device)
            self._lanes.append(lane)
        lane.copy(source, destination, place)

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=error is not None)
            for lane in self._lanes:
                lane.stream.synchronize()
        self._under_way.clear()
        self._lanes.clear()


@dataclass(slots=True)
class _Stage:
    """Pinned memory, and when the copy out of it has ended."""

    memory: Tensor
    free: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class _Lane:
    """One thread's stream and its two stages: while one is read into, the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._stages = [_Stage(torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True)) for _ in (0, 1)]

    def copy(self, source: Tensor, destination: Tensor, place: FilePlace | None) -> None:
        stage = self._stages[0]
        self._stages.reverse()
        stage.free.synchronize()
        if source.nbytes > stage.memory.nbytes:  # a row of more than 16 MiB
            stage.memory = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        memory = stage.memory[: source.nbytes]
        staged = memory.view(source.dtype).view(source.shape)
        if place is not None and source.is_contiguous():
            _read(place.descriptor, place.of(source), memory)
        else:
            staged.copy_(source)
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            if destination.dtype == source.dtype and destination.is_contiguous():
                destination.copy_(staged, non_blocking=True)
            else:  # moved as it is, and converted or scattered there
                destination.copy_(staged.to(self._device, non_blocking=True))
            stage.free.record(self.stream)


def _read(descriptor: int, offset: int, memory: Tensor) -> None:
    """Fills uint8 memory with a file's bytes from an offset on."""
    buffer = memoryview(memory.numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(
                f"a file of weights ends {len(buffer) - done} bytes too early; is it being written?"
            )
        done += count
