"""Groups of processes, through torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

from pagedinfer import ops
from pagedinfer.distributed.peer_all_reduce import MOST_BYTES_VARIABLE, PeerAllReduce
from pagedinfer.logging import get_logger

logger = get_logger(__name__)

_TIMEOUT = timedelta(minutes=30)  # whoever waits for a rank that hangs is ended by the engine long before

# One function, of which torch 2.11 knows the second name only.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class TorchGroup:
    """All processes of torch.distributed's default group, which must have been made.

    Args:
        device: of the tensors that the collectives are given.
        num_local_ranks: see `Group`.
        peer_bytes: tensors up to this size are summed over peer memory, where GPUs can; see `PeerAllReduce`.
            0: none.

    With a GPU and the gloo backend, tensors go through the host: several ranks may then share a GPU, which
    NCCL refuses, but CUDA graphs cannot hold that.
    """

    def __init__(self, device: torch.device, *, num_local_ranks: int, peer_bytes: int = 0) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.num_local_ranks = num_local_ranks
        self.num_collectives = 0
        """Begun so far, by which a monitor tells how far a rank has come."""
        self.can_be_captured = distributed.get_backend() == "nccl"
        self._through_host = device.type == "cuda" and not self.can_be_captured
        # What the hosts agree on must not wait for a GPU.
        self._host_group = distributed.new_group(backend="gloo") if self.can_be_captured else None
        self._peers: PeerAllReduce | None = None
        on_one_machine = num_local_ranks == self.size in ops.NUMBERS_OF_PEERS
        if peer_bytes and self.can_be_captured and on_one_machine:
            self._peers = self._connect_peers(peer_bytes, device)

    def _connect_peers(self, peer_bytes: int, device: torch.device) -> PeerAllReduce | None:
        """All ranks or none."""
        peers, reason = None, ""
        linked = () if MOST_BYTES_VARIABLE in os.environ else range(self.size)
        try:
            peers = PeerAllReduce(peer_bytes, self.rank, device, self.tell_all, linked)
        except RuntimeError as error:
            reason = str(error)
        if self._all_can(reason):
            assert peers is not None
            try:
                peers.check()
            except RuntimeError as error:
                reason = str(error)
            if self._all_can(reason):
                return peers
        if peers is not None:
            peers.close()
        return None

    def _all_can(self, reason: str) -> bool:
        """Whether no rank has a reason against sums over peer memory; if one has, the first says it."""
        refusing = [bool(each) for each in self.tell_all(torch.tensor([reason != ""]))]
        if any(refusing) and refusing.index(True) == self.rank:
            logger.warning("sums over GPUs are left to NCCL: %s", reason)
        return not any(refusing)

    def tell_all(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of the CPU of each rank, by rank."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(tensors, tensor, group=self._host_group)
        return tensors

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.num_collectives += 1
        if self._through_host:
            summed = tensor.cpu()
            distributed.all_reduce(summed)
            return tensor.copy_(summed)
        if self._peers is not None and self._peers.takes(tensor):
            self._peers.all_reduce(tensor)
            return tensor
        distributed.all_reduce(tensor)
        return tensor

    def all_reduce_norm(self, tensor: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        peers = self._peers
        if peers is None or not peers.takes(tensor):
            return ops.rms_norm(self.all_reduce(tensor), weight, epsilon, residual)
        self.num_collectives += 1
        peers.all_reduce_norm(tensor, residual, weight, epsilon)
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
    rank: int,
    size: int,
    store: Store,
    device: torch.device,
    *,
    nccl: bool,
    num_local_ranks: int,
    peer_bytes: int = 0,
) -> TorchGroup:
    """Makes torch.distributed's default group with this process as `rank`; waits for the others.

    Args:
        store: where the ranks find each other.
        nccl: for GPUs of which each has one rank; otherwise gloo.
        num_local_ranks, peer_bytes: see `TorchGroup`.
    """
    distributed.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=device if nccl else None,
    )
    return TorchGroup(device, num_local_ranks=num_local_ranks, peer_bytes=peer_bytes)
