"""Linear layers over few rows, as when a few requests decode: where they get kernels of their own.

There a step's time is that of reading the weights, and of whatever stands between two reads.
`ops.skinny_linear` begins to read while the kernel ahead still runs, and takes the norm before it and the
sums after it along, and `ops.rotary_attention` is all between two of these: a decoder layer is five launches.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pagedinfer import ops
from pagedinfer.kernel_library import build_info
from pagedinfer.layers.norm import RMSNorm

if TYPE_CHECKING:
    from pagedinfer.layers.linear import Linear

MAX_ROWS = 2
"""Up to here it is faster than cuBLAS: docs/decisions/0007-few-rows.md."""

MAX_ROWS_NARROW = 4
_NARROW = 2048
"""The same where rows have at most so many features: launches weigh more there, and arithmetic less."""

MAX_ATTENTION_ROWS = 4
"""Up to here `ops.rotary_attention`, eight blocks to a sequence and KV head, has all on the chip at once."""

_MOST_ELEMENTS = 1 << 16  # of an input whose rows, or four, fit into shared memory beside weights
_ALIGNMENT = 8  # features; 16 bytes, which the kernel reads at once


def served(input: Tensor) -> bool:
    """Whether `ops.skinny_linear` is to be used for [num_rows, features] of activations."""
    if input.dim() != 2:
        return False
    num_rows, features = input.shape
    most = MAX_ROWS_NARROW if features <= _NARROW else MAX_ROWS
    return num_rows <= most and _fits(input) and have_kernels(input)


def have_kernels(input: Tensor) -> bool:
    """Whether few rows of this dtype have kernels of their own on this device."""
    half = input.dtype in (torch.float16, torch.bfloat16)
    return half and input.is_cuda and _starts_early(input.device)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input W^T + b, by the faster kernel: [..., in_features] -> [..., out_features]"""
    if served(input) and input.stride(1) == 1 and input.stride(0) % _ALIGNMENT == 0:
        return ops.skinny_linear(input, weight, bias)
    return functional.linear(input, weight, bias)


def gated_linear(input: Tensor, layer: Linear) -> Tensor:
    """silu(left half) * right half of a linear layer, for an input that is `served`.

    [num_rows, in_features] -> [num_rows, out_features / 2]
    """
    return ops.skinny_linear(input, layer.weight, layer.bias, gated=True)


def _fits(input: Tensor) -> bool:
    num_rows, features = input.shape
    return features % _ALIGNMENT == 0 and num_rows * features <= _MOST_ELEMENTS


@cache
def _starts_early(device: torch.device) -> bool:
    """Whether kernels can start before those ahead have ended, as from Hopper on; else nothing is gained.

    On such a GPU a build for older ones runs as well, but without these kernels.
    """
    info = build_info()  # None: the build left no record
    return torch.cuda.get_device_capability(device)[0] >= 9 and (info is None or info.has_hopper_code)


# ---- parts of a layer on one rank, for inputs that are `served` --------------------------------------


def normed_linear(norm: RMSNorm, stream: Tensor, layer: Linear, *, gated: bool = False) -> Tensor:
    """layer(norm(stream)) of a linear layer; if `gated`, silu(left half) * right half of that.

    [num_rows, hidden] -> [num_rows, out_features], half of them if gated
    """
    return ops.skinny_linear(
        stream, layer.weight, layer.bias, norm_weight=norm.weight, epsilon=norm.epsilon, gated=gated
    )


def add_linear(stream: Tensor, input: Tensor, layer: Linear) -> None:
    """stream += layer(input), of a linear layer: [num_rows, hidden] += of [num_rows, in_features]"""
    if _fits(input):
        ops.skinny_linear(input, layer.weight, layer.bias, residual=stream, out=stream)
    else:
        stream += functional.linear(input, layer.weight, layer.bias)
