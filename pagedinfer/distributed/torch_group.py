"""Groups of processes, through torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

# One function, of which torch 2.11 knows the second name only.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class TorchGroup:
    """All processes of torch.distributed's default group, which must have been made.

    Args:
        device: of the tensors that the collectives are given.
        num_local_ranks: see `Group`.

    With a GPU and the gloo backend, tensors go through the host: several ranks may then share a GPU, which
    NCCL refuses, but CUDA graphs cannot hold that.
    """

    def __init__(self, device: torch.device, *, num_local_ranks: int) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.num_local_ranks = num_local_ranks
        self.num_collectives = 0
        """Begun so far, by which a monitor tells how far a rank has come."""
        self.can_be_captured = distributed.get_backend() == "nccl"
        self._through_host = device.type == "cuda" and not self.can_be_captured
        # What the hosts agree on must not wait for a GPU.
        self._host_group = distributed.new_group(backend="gloo") if self.can_be_captured else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.num_collectives += 1
        if self._through_host:
            summed = tensor.cpu()
            distributed.all_reduce(summed)
            return tensor.copy_(summed)
        distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.num_collectives += 1
        rows, width = tensor.shape
        part = (tensor.cpu() if self._through_host else tensor).contiguous()
        parts = torch.empty((self.size, rows, width), dtype=part.dtype, device=part.device)
        _all_gather(parts.view(self.size * rows, width), part)
        return parts.to(tensor.device).transpose(0, 1).reshape(rows, self.size * width)

    def least(self, values: Sequence[int]) -> list[int]:
        self.num_collectives += 1
        agreed = torch.tensor(list(values), dtype=torch.int64)
        distributed.all_reduce(agreed, distributed.ReduceOp.MIN, group=self._host_group)
        return [int(value) for value in agreed]


def join(
    rank: int, size: int, store: Store, device: torch.device, *, nccl: bool, num_local_ranks: int
) -> TorchGroup:
    """Makes torch.distributed's default group with this process as `rank`; waits for the others.

    Args:
        store: where the ranks find each other.
        nccl: for GPUs of which each has one rank; otherwise gloo.
    """
    distributed.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=device if nccl else None,
    )
    return TorchGroup(device, num_local_ranks=num_local_ranks)


def leave() -> None:
    """Ends torch.distributed's default group, in this process."""
    distributed.destroy_process_group()


_TIMEOUT = timedelta(minutes=30)  # whoever waits for a rank that hangs is ended by the engine long before
