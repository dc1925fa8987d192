"""Mixtures of experts: each token goes through the few experts that its router picks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedinfer.distributed.sharding import shard_evenly
from pagedinfer.layers.activation import gated_activation
from pagedinfer.layers.linear import Linear
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.stored_tensor import Piece, StoredTensor

_GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has a grouped kernel, of bfloat16; elsewhere it loops."""


class Experts(nn.Module):
    """Gated MLPs side by side; `names` are those of gate, up and down in checkpoints.

    The tokens are sorted by expert, and each projection of all experts is one grouped GEMM, which finds on
    the device how many tokens each expert has.

    Each rank has its part of every expert's inner size, so that all have the same to do whatever the router
    picks; `forward` sums over the ranks, unless `placement` defers sums.
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
        self.group = placement.group
        self.defers_sum = placement.defers_sums
        self.inner = shard_evenly(intermediate_size, placement.group)
        self.gate_up = placement.parameter(num_experts, 2 * self.inner.size, hidden_size)
        self.down = placement.parameter(num_experts, hidden_size, self.inner.size)
        self.activation = gated_activation(activation)
        self.names = names
        self.expert_ids: Tensor
        self.register_buffer(
            "expert_ids", torch.arange(num_experts, device=placement.device), persistent=False
        )

    @property
    def waits_for_the_device(self) -> bool:
        """Whether torch's grouped GEMM reads its sizes on the host: a CUDA graph cannot hold that."""
        weight = self.gate_up
        return not (
            weight.is_cuda
            and weight.dtype == torch.bfloat16
            and torch.cuda.get_device_capability(weight.device)[0] in _GROUPED_CAPABILITIES
        )

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, StoredTensor]]:
        """The name of each tensor in a checkpoint, and what this layer takes from it."""
        gate_name, up_name, down_name = self.names
        total, hidden_size = self.inner.total, self.down.shape[1]
        inner, outer = slice(self.inner.start, self.inner.stop), slice(0, hidden_size)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            for name, rows in zip((gate_name, up_name), gate_up.chunk(2), strict=True):
                yield (
                    f"{path}.{expert}.{name}.weight",
                    StoredTensor((total, hidden_size), [Piece((inner, outer), rows)]),
                )
            yield (
                f"{path}.{expert}.{down_name}.weight",
                StoredTensor((hidden_size, total), [Piece((outer, inner), down)]),
            )

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden: dtype [num_tokens, hidden]
            weights: float32 [num_tokens, k]
            experts: int64 [num_tokens, k]
        """
        num_tokens, k = experts.shape
        sorted_experts, order = experts.flatten().sort(stable=True)  # by expert, then by token
        ends = torch.searchsorted(sorted_experts, self.expert_ids, right=True, out_int32=True)
        rows = hidden.index_select(0, order // k)
        inner = self.activation(functional.grouped_mm(rows, self.gate_up.mT, offs=ends))
        results = functional.grouped_mm(inner, self.down.mT, offs=ends)
        # Back by token, and summed in the order of its experts' ranks: by no other token's, nor by chance.
        numbers = torch.arange(order.shape[0], device=order.device)
        place = torch.empty_like(order).scatter_(0, order, numbers)
        results = results.index_select(0, place).view(num_tokens, k, -1)
        output = (results * weights[..., None]).sum(1)  # multiplied and summed in float32
        output = output.to(hidden.dtype)
        return output if self.defers_sum else self.group.all_reduce(output)


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
