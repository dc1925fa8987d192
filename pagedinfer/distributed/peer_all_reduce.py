"""All-reduce over peer memory: each GPU reads the others' parts and sums them.

NCCL's protocol takes most of the time of a small sum, such as a step of decodes has. Here one kernel puts the
data where the other GPUs can read it, waits until all have done so, and sums. See `ops.peer_all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.distributed.peer_memory import HANDLE_BYTES, PeerMemory

_ALIGNMENT = 16  # bytes
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Exchange = Callable[[Tensor], Sequence[Tensor]]
"""A tensor of the CPU of each rank, told to all."""


class PeerAllReduce:
    """The ranks of one machine, each with a GPU. All must make one together; one process is one rank.

    Args:
        max_bytes: of the largest tensor that is summed here.
        rank: of this process.
        device: its GPU.
        exchange: with the other ranks.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory.
    """

    def __init__(self, max_bytes: int, rank: int, device: torch.device, exchange: Exchange) -> None:
        self._rank = rank
        self._max_bytes = max_bytes // _ALIGNMENT * _ALIGNMENT
        try:
            self._memory = PeerMemory(ops.peer_memory_bytes(self._max_bytes), device)
            handle = self._memory.handle()
        except RuntimeError:
            exchange(torch.zeros(HANDLE_BYTES, dtype=torch.uint8))  # which the others cannot open either
            raise
        self._addresses = self._memory.open(exchange(handle), rank)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can be summed here."""
        return (
            0 < tensor.nbytes <= self._max_bytes
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.data_ptr() % _ALIGNMENT == 0
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
        )

    def all_reduce(self, tensor: Tensor) -> None:
        """Makes a tensor the sum over all ranks, in place."""
        ops.peer_all_reduce(tensor, self._addresses, self._rank, self._max_bytes)

    def all_reduce_norm(self, tensor: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
        """The same, and then `ops.rms_norm` with a residual, all in place."""
        rows, residuals = (each.view(-1, each.shape[-1]) for each in (tensor, residual))
        place = self._addresses, self._rank, self._max_bytes
        ops.peer_all_reduce_norm(rows, residuals, weight, epsilon, *place)

    def close(self) -> None:
        """Gives the memory back, once all ranks use it no more."""
        self._memory.close()
