"""Linear layers, alone and with the projections of several checkpoint tensors fused into one GEMM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedinfer.layers.placement import Placement


class Linear(nn.Module):
    """y = x W^T + b; weight [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(out_features, in_features)
        self.bias = placement.parameter(out_features) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return functional.linear(input, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of one input as one GEMM; the outputs lie side by side.

    `parts` maps the name that each projection has in checkpoints, beside this layer's own place, to its
    number of output features: {"q_proj": 512, "k_proj": 128, "v_proj": 128}.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, placement=placement)
        self.parts = dict(parts)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """The name of each tensor in a checkpoint, and the view of this layer's memory that it fills."""
        parent = path.rpartition(".")[0]
        sizes = list(self.parts.values())
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                for part, view in zip(self.parts, torch.split(parameter, sizes), strict=True):
                    yield f"{parent}.{part}.{kind}", view


class TransposedLinear(Linear):
    """A linear layer whose weight checkpoints have as [in_features, out_features], as GPT-2's do."""

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """As FusedLinear's."""
        yield f"{path}.weight", self.weight.t()
        if self.bias is not None:
            yield f"{path}.bias", self.bias
