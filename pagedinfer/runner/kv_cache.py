"""The KV cache: one tensor of blocks on the device, and one on the CPU to swap to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import Batch
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

    def allocate(self, num_blocks: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """Uninitialised blocks: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        shape = (
            num_blocks,
            self.num_layers,
            2,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
        )
        return torch.empty(shape, dtype=self.dtype, device=device, pin_memory=pinned)


class KVCache:
    """The blocks on the device and on the CPU, and what a step moves between them."""

    def __init__(
        self, shape: KVCacheShape, *, num_blocks: int, num_cpu_blocks: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.blocks = shape.allocate(num_blocks, device)
        self.cpu_blocks = shape.allocate(
            num_cpu_blocks, torch.device("cpu"), pinned=device.type == "cuda" and num_cpu_blocks > 0
        )

    def move(self, batch: Batch) -> None:
        """Carries out a batch's swaps out, then its swaps in, then its copies."""
        if batch.swaps_out:
            ops.swap_blocks(self.blocks, self.cpu_blocks, pairs(batch.swaps_out))
        if batch.swaps_in:
            ops.swap_blocks(self.cpu_blocks, self.blocks, pairs(batch.swaps_in))
        if batch.copies:
            ops.copy_blocks(self.blocks, pairs(batch.copies))
