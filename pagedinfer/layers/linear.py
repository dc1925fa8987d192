"""Linear layers: whole, or divided among the ranks by outputs or by inputs (Shoeybi et al., 2019).

A layer divided by outputs feeds one divided by inputs, whose partial results are summed: one all-reduce for
the two. With one rank both are plain linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedinfer import ops
from pagedinfer.distributed.sharding import Shard
from pagedinfer.layers import decode_rows, few_rows
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.stored_tensor import Piece, StoredTensor

_HALF_TYPES = (torch.float16, torch.bfloat16)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input . weight^T + bias: by the kernel that is quickest for them here.

    [..., in_features], [out_features, in_features], [out_features] -> [..., out_features]
    """
    if _by_half_linear(weight):
        return ops.half_linear(input, weight, bias)
    if decode_rows.served(input, weight):
        return ops.decode_linear(input, weight, bias)
    return few_rows.linear(input, weight, bias)


def grouped_linear(input: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times the transpose of its own matrix, as `linear` does one.

    Args:
        input: dtype [num_rows, in_features]
        weights: dtype [num_groups, out_features, in_features]
        ends: int32 [num_groups], ascending: group g is the rows from ends[g - 1] (or 0) to ends[g] - 1.

    Returns:
        dtype [num_rows, out_features]; rows behind the last group are undefined.
    """
    if not _by_half_linear(weights):
        return functional.grouped_mm(input, weights.mT, offs=ends)
    output = input.new_empty(input.shape[0], weights.shape[1])
    begin = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > begin:
            ops.half_linear(input[begin:end], weight, out=output[begin:end])
            begin = end
    return output


def _by_half_linear(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu"
    return on_cpu and weight.dtype in _HALF_TYPES and ops.half_linear_pays(weight.dtype)


class Linear(nn.Module):
    """y = x W^T + b; weight [out_features, in_features]. Every rank has all of it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(out_features, in_features)
        self.bias = placement.parameter(out_features) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return linear(input, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """This rank's outputs of a linear layer, or of several projections of one input as one GEMM.

    The outputs lie side by side, in the order of `parts`. These map the name that a tensor has in
    checkpoints, beside this layer's own place, to the shards of its outputs, in their order: {"q_proj": [q],
    "k_proj": [k], "v_proj": [v]}, or {"qkv_proj": [q, k, v]} where they are stored as one.

    `transposed`: checkpoints have the weights as [in_features, out_features], as GPT-2's do.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, Sequence[Shard]],
        *,
        bias: bool,
        placement: Placement,
        transposed: bool = False,
    ) -> None:
        num_outputs = sum(shard.size for shards in parts.values() for shard in shards)
        super().__init__(in_features, num_outputs, bias=bias, placement=placement)
        self.parts = dict(parts)
        self.transposed = transposed

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, StoredTensor]]:
        """The name of each tensor in a checkpoint, and what this layer takes from it."""
        parent = path.rpartition(".")[0]
        row = 0
        for part, shards in self.parts.items():
            outputs = []  # (where they are in the stored tensor, where they are here)
            total = 0
            for shard in shards:
                stored = slice(total + shard.start, total + shard.stop)
                outputs.append((stored, slice(row, row + shard.size)))
                total += shard.total
                row += shard.size
            yield f"{parent}.{part}.weight", self._stored_weight(total, outputs)
            if self.bias is not None:
                pieces = [Piece((stored,), self.bias[here]) for stored, here in outputs]
                yield f"{parent}.{part}.bias", StoredTensor((total,), pieces)

    def _stored_weight(self, num_outputs: int, outputs: Sequence[tuple[slice, slice]]) -> StoredTensor:
        num_inputs = self.weight.shape[1]
        inputs = slice(0, num_inputs)
        if self.transposed:
            pieces = [Piece((inputs, stored), self.weight[here].t()) for stored, here in outputs]
            return StoredTensor((num_inputs, num_outputs), pieces)
        pieces = [Piece((stored, inputs), self.weight[here]) for stored, here in outputs]
        return StoredTensor((num_outputs, num_inputs), pieces)


class RowParallelLinear(Linear):
    """A linear layer of which this rank has the part for its inputs; `forward` sums over the ranks.

    Unless `placement` defers sums: then it gives this rank's part of them.

    `transposed`: as in ColumnParallelLinear.
    """

    def __init__(
        self,
        inputs: Shard,
        out_features: int,
        *,
        bias: bool,
        placement: Placement,
        transposed: bool = False,
    ) -> None:
        super().__init__(inputs.size, out_features, bias=bias, placement=placement)
        self.inputs = inputs
        self.group = placement.group
        self.defers_sum = placement.defers_sums
        self.transposed = transposed

    def forward(self, input: Tensor) -> Tensor:
        """[..., this rank's inputs] -> [..., out_features]"""
        bias = self.bias if self.group.rank == 0 else None  # it must enter the sum once
        output = linear(input, self.weight, bias)
        return output if self.defers_sum else self.group.all_reduce(output)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, StoredTensor]]:
        """As ColumnParallelLinear's."""
        num_outputs = self.weight.shape[0]
        outputs, inputs = slice(0, num_outputs), slice(self.inputs.start, self.inputs.stop)
        if self.transposed:
            shape, piece = (self.inputs.total, num_outputs), Piece((inputs, outputs), self.weight.t())
        else:
            shape, piece = (num_outputs, self.inputs.total), Piece((outputs, inputs), self.weight)
        yield f"{path}.weight", StoredTensor(shape, [piece])
        if self.bias is not None:
            yield f"{path}.bias", StoredTensor.whole(self.bias)
