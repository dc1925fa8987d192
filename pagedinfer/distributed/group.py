"""The ranks that share a model, and what they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pagedinfer import ops


class Group(Protocol):
    """Ranks that run the same steps on their parts of one model.

    Every rank must call the same collectives in the same order. Layers are handed the group they belong to
    (see `Placement`); there is none that they could look up.
    """

    @property
    def rank(self) -> int:
        """This process's number, in [0, size)."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def num_local_ranks(self) -> int:
        """How many of them are on this machine and share its memory."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold the collectives on device tensors."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; may be `tensor` itself, which is overwritten."""

    def all_reduce_norm(self, tensor: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """`ops.rms_norm` of `all_reduce(tensor)` with a residual, perhaps in one pass."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[rows, n] of each rank, side by side in their order: [rows, size * n]."""

    def least(self, values: Sequence[int]) -> list[int]:
        """For each place the least of the ranks' numbers, which the host agrees on."""


class SingleRank:
    """A group of one: nothing has to be told to anybody."""

    rank = 0
    size = 1
    num_local_ranks = 1
    can_be_captured = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce_norm(self, tensor: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return ops.rms_norm(tensor, weight, epsilon, residual)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def least(self, values: Sequence[int]) -> list[int]:
        return list(values)


SINGLE_RANK: Group = SingleRank()
