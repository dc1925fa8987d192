"""Normalization layers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pagedinfer import ops
from pagedinfer.distributed.group import SINGLE_RANK
from pagedinfer.layers.placement import Placement


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019), with the addition of the residual stream fused into it.

    Where `placement` defers sums, an input that comes with a residual is a rank's part of one, which is
    made here.
    """

    def __init__(self, size: int, epsilon: float, *, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.epsilon = epsilon
        self.group = placement.group if placement.defers_sums else SINGLE_RANK

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., size] -> the same shape. A residual is updated in place: norm(residual += input)."""
        if residual is None:
            return ops.rms_norm(input, self.weight, self.epsilon)
        return self.group.all_reduce_norm(input, residual, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """LayerNorm (Ba et al., 2016), with a bias."""

    def __init__(self, size: int, epsilon: float, *, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.bias = placement.parameter(size)
        self.epsilon = epsilon

    def forward(self, input: Tensor) -> Tensor:
        """[..., size] -> the same shape"""
        return functional.layer_norm(input, self.weight.shape, self.weight, self.bias, self.epsilon)


class OffsetRMSNorm(nn.Module):
    """RMSNorm whose weight is stored as its distance from one, and applied in float32, as Gemma has it."""

    def __init__(self, size: int, epsilon: float, *, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.epsilon = epsilon

    def forward(self, input: Tensor, addend: Tensor | None = None) -> Tensor:
        """[..., size] -> the same shape, added to `addend` if there is one."""
        return ops.offset_rms_norm(input, self.weight, self.epsilon, addend)
