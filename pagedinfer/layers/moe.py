"""Mixtures of experts: each token goes through the few experts that its router picks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedinfer.layers.activation import gated_activation
from pagedinfer.layers.linear import Linear
from pagedinfer.layers.placement import Placement


class Experts(nn.Module):
    """Gated MLPs side by side; `names` are those of gate, up and down in checkpoints.

    Each expert runs on the tokens that were sent to it, one expert after another. How many those are is
    read on the host, so a step with experts waits for the device and cannot be captured in a graph.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        names: tuple[str, str, str],
        placement: Placement,
    ) -> None:
        super().__init__()
        self.gate_up = placement.parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.down = placement.parameter(num_experts, hidden_size, intermediate_size)
        self.activation = gated_activation(activation)
        self.names = names

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """The name of each tensor in a checkpoint, and the view of this layer's memory that it fills."""
        gate_name, up_name, down_name = self.names
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            yield f"{path}.{expert}.{gate_name}.weight", gate
            yield f"{path}.{expert}.{up_name}.weight", up
            yield f"{path}.{expert}.{down_name}.weight", down

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden: dtype [num_tokens, hidden]
            weights: float32 [num_tokens, k]
            experts: int64 [num_tokens, k]
        """
        num_experts, k = self.gate_up.shape[0], experts.shape[1]
        order = experts.flatten().argsort(stable=True)  # by expert, then by token
        tokens = order // k
        counts = experts.flatten().bincount(minlength=num_experts).tolist()
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                rows = tokens[begin : begin + count]
                inner = self.activation(functional.linear(hidden[rows], self.gate_up[expert]))
                result = functional.linear(inner, self.down[expert])
                share = weights.flatten()[order[begin : begin + count], None]
                output.index_add_(0, rows, result.float() * share)
                begin += count
        return output.to(hidden.dtype)


class MixtureOfExperts(nn.Module):
    """A router and its experts (Shazeer et al., 2017): the k best by softmax of the router's scores.

    `renormalize` makes the weights of the k sum to one.
    """

    def __init__(
        self, experts: Experts, hidden_size: int, *, k: int, renormalize: bool, placement: Placement
    ) -> None:
        super().__init__()
        num_experts = experts.gate_up.shape[0]
        if not 1 <= k <= num_experts:
            raise ValueError(f"num_experts_per_tok must be in [1, {num_experts}], got {k}")
        self.gate = Linear(hidden_size, num_experts, bias=False, placement=placement)
        self.experts = experts
        self.k = k
        self.renormalize = renormalize

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        probabilities = self.gate(hidden).softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(hidden, weights, experts)  # type: ignore[no-any-return]
