"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor, nn

from pagedinfer import ops
from pagedinfer.distributed.sharding import shard_evenly
from pagedinfer.layers import decode_rows, few_rows
from pagedinfer.layers.activation import gated_activation
from pagedinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from pagedinfer.layers.norm import RMSNorm
from pagedinfer.layers.placement import Placement


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up as one GEMM.

    `merged` says that checkpoints have gate and up as one tensor too, gate_up_proj.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        placement: Placement,
        merged: bool = False,
    ) -> None:
        super().__init__()
        inner = shard_evenly(intermediate_size, placement.group)
        parts = {"gate_proj": [inner], "up_proj": [inner]}
        if merged:
            parts = {"gate_up_proj": [inner, inner]}
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias=bias, placement=placement)
        self.down_proj = RowParallelLinear(inner, hidden_size, bias=bias, placement=placement)
        self.activation = gated_activation(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        return self.down_proj(self._gated(hidden))  # type: ignore[no-any-return]

    def _gated(self, hidden: Tensor) -> Tensor:
        """activation(gate(hidden)) * up(hidden), in one kernel where there is one."""
        layer = self.gate_up_proj
        if self.activation is ops.silu_and_mul:
            if few_rows.served(hidden):
                return few_rows.gated_linear(hidden, layer)
            if decode_rows.served(hidden, layer.weight, gated=True):
                return ops.decode_linear(hidden, layer.weight, layer.bias, gated=True)
        return self.activation(layer(hidden))

    def add_to(self, stream: Tensor, norm: RMSNorm) -> None:
        """stream += self(norm(stream)), [num_rows, hidden]: over few rows on one rank."""
        gated = self.activation is ops.silu_and_mul
        inner = few_rows.normed_linear(norm, stream, self.gate_up_proj, gated=gated)
        few_rows.add_linear(stream, inner if gated else self.activation(inner), self.down_proj)
