"""All-reduce over peer memory: each GPU has the others' parts in its reach and sums them.

NCCL's protocol takes most of the time of a small sum, such as a step of decodes has. Here one kernel puts the
data where the other GPUs can read it, or sends it to them, waits until all have done so, and sums. See
`ops.peer_all_reduce`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.distributed.peer_memory import HANDLE_BYTES, PeerMemory

MOST_BYTES_VARIABLE = "PAGEDINFER_PEER_ALL_REDUCE_BYTES"
MOST_BYTES = {2: 16 << 20}
"""By the number of ranks: up to here it was measured to be faster than NCCL, on GPUs with NVLink. Others are
left to NCCL unless the variable says up to which size."""

_ALIGNMENT = 16  # bytes
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SECONDS_TO_TRY = 10.0

Exchange = Callable[[Tensor], Sequence[Tensor]]
"""A tensor of the CPU of each rank, told to all."""


def most_bytes(num_ranks: int) -> int:
    """The size of the largest tensors that so many ranks sum here; 0: none.

    Raises:
        ValueError: the environment's variable is not a size.
    """
    given = os.environ.get(MOST_BYTES_VARIABLE)
    if given is None:
        return MOST_BYTES.get(num_ranks, 0)
    if not given.isdecimal():
        raise ValueError(f"{MOST_BYTES_VARIABLE} must be a number of bytes, such as 1048576, got {given!r}")
    return int(given) if num_ranks in ops.NUMBERS_OF_PEERS else 0


class PeerAllReduce:
    """The ranks of one machine, each with a GPU. All must make one together; one process is one rank.

    Args:
        max_bytes: of the largest tensor that is summed here.
        rank: of this process.
        device: its GPU.
        exchange: with the other ranks.
        linked: the GPUs of all ranks, if it is to be for GPUs with NVLink only.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory, or are not as `linked` asks.
    """

    def __init__(
        self,
        max_bytes: int,
        rank: int,
        device: torch.device,
        exchange: Exchange,
        linked: Sequence[int] = (),
    ) -> None:
        self._rank = rank
        self._device = device
        self._max_bytes = max_bytes // _ALIGNMENT * _ALIGNMENT
        try:
            self._memory = PeerMemory(ops.peer_memory_bytes(self._max_bytes), device)
            handle = self._memory.handle()
        except RuntimeError:
            exchange(torch.zeros(HANDLE_BYTES, dtype=torch.uint8))  # which the others cannot open either
            raise
        handles = exchange(handle)
        try:
            if not self._memory.are_linked(linked):
                raise RuntimeError(f"there is no NVLink between all GPUs; see {MOST_BYTES_VARIABLE}")
            self._addresses = self._memory.open(handles, rank)
        except RuntimeError:
            self._memory.close()
            raise

    def check(self) -> None:
        """Sums something with the other ranks, all of which must call this first, and at once.

        There are machines whose GPUs say that they can read each other's memory, and cannot.

        Raises:
            RuntimeError: what the others send does not arrive, or is wrong.
        """
        num_ranks = len(self._addresses)
        sizes = {min(size, self._max_bytes) for size in (ops.MOST_PUSHED_BYTES, 4 * ops.MOST_PUSHED_BYTES)}
        for call, size in enumerate(sorted(sizes), 1):
            places = torch.arange(size // 4, device=self._device) % 1021.0
            data = places * (self._rank + 1)
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
                self.all_reduce(data)
                ended: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ended.record()
            deadline = time.monotonic() + _SECONDS_TO_TRY
            while not ended.query():
                if time.monotonic() > deadline:
                    self._memory.fill(call)  # what the kernel waits for
                    ended.synchronize()
                    raise RuntimeError("GPUs are said to reach each other's memory, and do not")
                time.sleep(1e-4)
            if not torch.equal(data, places * (num_ranks * (num_ranks + 1) // 2)):
                raise RuntimeError("GPUs are said to reach each other's memory, and sums come out wrong")

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
