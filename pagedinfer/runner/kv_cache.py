"""The KV cache: one tensor of blocks on the device, and one on the CPU to swap to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import Batch
from pagedinfer.runner.block_swaps import BlockSwaps
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
        self._swaps = BlockSwaps(self.blocks, self.cpu_blocks)

    def close(self) -> None:
        """Unpins the CPU blocks; no copy may be under way."""
        if self._pinned is not None:
            self._pinned.release()

    def take_swap_timings(self) -> list[tuple[int, float]]:
        """(blocks, seconds) of the swaps that have ended since the last call, each one way."""
        return self._swaps.take_timings()

    @property
    def swaps_in_done(self) -> int:
        """See `BlockSwaps.swaps_in_done`."""
        return self._swaps.swaps_in_done

    def move(self, batch: Batch) -> None:
        """Carries out a batch's swaps out, then its swaps in, then its copies; see `BlockSwaps`."""
        self._swaps.start(batch)
        if batch.copies:
            ops.copy_blocks(self.blocks, pairs(batch.copies))
