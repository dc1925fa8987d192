"""The KV cache: one tensor of blocks on the device, and one on the CPU to swap to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import Batch
from pagedinfer.runner.pinned import PinnedMemory
from pagedinfer.runner.upload import pairs


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """What one block holds: `block_size` tokens of K and V of all layers, in one piece."""

    num_layers: int
    num_kv_heads: int
    block_size: int  # tokens
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Uninitialised blocks: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        shape = (
            num_blocks,
            self.num_layers,
            2,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
        )
        return torch.empty(shape, dtype=self.dtype, device=device)


class _SwapTiming:
    """How long some work takes, on the device's own clock where that works on by itself."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self._on_gpu = device.type == "cuda"
        self._marks = [self._mark()]

    def stop(self) -> None:
        self._marks.append(self._mark())

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


class KVCache:
    """The blocks on the device and on the CPU, and what a step moves between them."""

    def __init__(
        self, shape: KVCacheShape, *, num_blocks: int, num_cpu_blocks: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.blocks = shape.allocate(num_blocks, device)
        self.cpu_blocks = shape.allocate(num_cpu_blocks, torch.device("cpu"))
        self._pinned: PinnedMemory | None = None
        if device.type == "cuda" and num_cpu_blocks > 0:
            self._pinned = PinnedMemory(self.cpu_blocks)
        self._timings: list[_SwapTiming] = []

    def close(self) -> None:
        """Unpins the CPU blocks; no copy may be under way."""
        if self._pinned is not None:
            self._pinned.release()

    def take_swap_timings(self) -> list[tuple[int, float]]:
        """(blocks, seconds) of the swaps since the last call, each one way; waits for their end."""
        timings, self._timings = self._timings, []
        return [(timing.num_blocks, timing.seconds()) for timing in timings]

    def move(self, batch: Batch) -> None:
        """Carries out a batch's swaps out, then its swaps in, then its copies."""
        if batch.swaps_out:
            self._swap(self.blocks, self.cpu_blocks, batch.swaps_out)
        if batch.swaps_in:
            self._swap(self.cpu_blocks, self.blocks, batch.swaps_in)
        if batch.copies:
            ops.copy_blocks(self.blocks, pairs(batch.copies))

    def _swap(self, source: Tensor, destination: Tensor, mapping: Sequence[tuple[int, int]]) -> None:
        timing = _SwapTiming(len(mapping), self.blocks.device)
        ops.swap_blocks(source, destination, pairs(mapping))
        timing.stop()
        self._timings.append(timing)
