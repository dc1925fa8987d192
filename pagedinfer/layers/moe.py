"""Mixtures of experts: each token goes through the few experts that its router picks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pagedinfer import ops
from pagedinfer.distributed.sharding import shard_evenly
from pagedinfer.layers.activation import gated_activation
from pagedinfer.layers.linear import Linear, grouped_linear
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.stored_tensor import Piece, StoredTensor

_GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has a grouped kernel, of bfloat16; elsewhere it loops."""

_FEW_PAIRS = 64
"""Up to so many tokens an expert, on average, our kernels are quicker than torch's grouped GEMM."""


class Experts(nn.Module):
    """Gated MLPs side by side; `names` are those of gate, up and down in checkpoints.

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
        self.has_kernels = (
            placement.device.type == "cuda"
            and placement.dtype != torch.float32
            and activation == "silu"
            and num_experts <= ops.MOST_EXPERTS
            and hidden_size % 8 == 0
            and self.inner.size % 8 == 0
        )
        """Whether our own kernels, which are made for half types, serve this layer."""
        self.has_grouped_gemm = (
            placement.device.type == "cuda"
            and placement.dtype == torch.bfloat16
            and torch.cuda.get_device_capability(placement.device)[0] in _GROUPED_CAPABILITIES
        )
        """Whether torch's grouped GEMM is one kernel here."""

    @property
    def waits_for_the_device(self) -> bool:
        """Whether a step reads on the host how many tokens an expert has: a CUDA graph cannot hold that."""
        return not (self.has_kernels or self.has_grouped_gemm)

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

    def forward(self, hidden: Tensor, scores: Tensor, k: int, renormalize: bool) -> Tensor:
        """The weighted sum of each token's k best experts.

        Args:
            hidden: dtype [num_tokens, hidden]
            scores: dtype [num_tokens, num_experts], the router's.
            k: experts a token.
            renormalize: make the weights of the k sum to one.
        """
        pairs_of_an_expert = hidden.shape[0] * k / scores.shape[1]
        few = pairs_of_an_expert <= _FEW_PAIRS
        if self.has_kernels and k <= ops.MOST_EXPERTS_OF_A_TOKEN and (few or not self.has_grouped_gemm):
            block_rows = 16 if pairs_of_an_expert <= 16 else 64
            routing = ops.route_experts(scores, k, renormalize=renormalize, block_rows=block_rows)
            return self._summed(ops.expert_mlp(hidden, self.gate_up, self.down, routing))
        weights, experts = scores.softmax(dim=-1, dtype=torch.float32).topk(k, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self._grouped(hidden, weights, experts)

    def _grouped(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The tokens are sorted by expert, and each projection is one grouped GEMM: not by our kernels."""
        num_tokens, k = experts.shape
        sorted_experts, order = experts.flatten().sort(stable=True)  # by expert, then by token
        expert_ids = torch.arange(self.gate_up.shape[0], device=experts.device)
        ends = torch.searchsorted(sorted_experts, expert_ids, right=True, out_int32=True)
        rows = hidden.index_select(0, order // k)
        inner = self.activation(grouped_linear(rows, self.gate_up, ends))
        results = grouped_linear(inner, self.down, ends)
        # Back by token, and summed in the order of its experts' ranks: by no other token's, nor by chance.
        numbers = torch.arange(order.shape[0], device=order.device)
        place = torch.empty_like(order).scatter_(0, order, numbers)
        results = results.index_select(0, place).view(num_tokens, k, -1)
        output = (results * weights[..., None]).sum(1)  # multiplied and summed in float32
        return self._summed(output.to(hidden.dtype))

    def _summed(self, output: Tensor) -> Tensor:
        """Over the ranks, unless the norm that follows does that."""
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
        return self.experts(hidden, self.gate(hidden), self.k, self.renormalize)  # type: ignore[no-any-return]
