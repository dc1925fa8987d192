"""Where and in which precision the weights of a model live, and which ranks share them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from pagedinfer.distributed.group import SINGLE_RANK, Group


@dataclass(frozen=True, slots=True)
class Placement:
    """Handed to every layer that has weights."""

    dtype: torch.dtype
    device: torch.device
    group: Group = SINGLE_RANK
    defers_sums: bool = False
    """Whether layers leave the sum over the ranks of what they give to the norm that follows them."""

    def deferring_sums(self) -> Placement:
        """The same for layers whose outputs go into a norm with the residual stream, and nowhere else."""
        return replace(self, defers_sums=True)

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter, for inference only."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)
