"""All-reduce of small tensors over peer memory: each GPU reads the others' and sums.

NCCL sends pieces around; for a few kilobytes, as steps of few tokens have, the time goes into its protocol.
Here one kernel waits until all ranks have their part in memory that the others can read, sums those parts,
and waits until all have read. The traffic grows with the number of ranks: it is for small tensors and few
ranks.

The kernel is torch's (torch.ops.symm_mem); it uses neither multicast nor multimem instructions.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed

from pagedinfer.logging import get_logger

logger = get_logger(__name__)

_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16  # bytes, of what the kernel loads at once


class PeerAllReduce:
    """For the default group, whose ranks each have a GPU of this machine; all ranks must make one together.

    Args:
        max_bytes: of the largest tensor.
        device: this rank's GPU.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory, or this torch cannot have them do so.
    """

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # it is of no use here
        from torch.distributed import _symmetric_memory as symmetric_memory

        group = distributed.group.WORLD
        assert group is not None
        self._name = group.group_name
        self._max_bytes = max_bytes
        # In float32, of which the other dtypes are views.
        self._memory = symmetric_memory.empty(max_bytes // 4, dtype=torch.float32, device=device)
        self._handle = symmetric_memory.rendezvous(self._memory, group)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can be summed here."""
        return (
            0 < tensor.nbytes <= self._max_bytes
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in a new tensor."""
        buffer = self._memory.view(tensor.dtype)[: tensor.numel()]
        buffer.copy_(tensor.view(-1))
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._name)
        return summed.view(tensor.shape)
