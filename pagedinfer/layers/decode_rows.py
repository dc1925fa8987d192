"""Linear layers over the rows of a step of decodes: where `ops.decode_linear` takes the place of cuBLAS.

It begins to read the weight while the kernel ahead still runs, and needs no kernel of its own for SwiGLU.
Where it is ahead was measured: docs/decisions/0010-decode-linear.md.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pagedinfer.kernel_library import build_info

_MIN_ROWS = 5  # fewer are the business of few_rows
_MAX_ROWS = 112
_MAX_ROWS_OF_SMALL = 32
_SMALL = 1 << 23
"""Elements of a weight; cuBLAS reads smaller ones as fast from some dozens of rows on."""

_ALIGNMENT = 8  # features; 16 bytes, at which the copy engine's rows begin


def served(input: Tensor, weight: Tensor, *, gated: bool = False) -> bool:
    """Whether `ops.decode_linear` is to be used for an input, [..., in_features], and a weight."""
    most = _MAX_ROWS_OF_SMALL if weight.numel() < _SMALL else _MAX_ROWS
    if input.dim() != 2 or not _MIN_ROWS <= input.shape[0] <= most:
        return False
    half = input.dtype in (torch.float16, torch.bfloat16)
    if not (half and input.is_cuda and _has_kernel(input.device)):
        return False
    rows_fit = input.stride(1) == 1 and input.stride(0) % _ALIGNMENT == 0 and weight.is_contiguous()
    multiple = 2 * _ALIGNMENT if gated else 2
    return rows_fit and input.shape[1] % _ALIGNMENT == 0 and weight.shape[0] % multiple == 0


@cache
def _has_kernel(device: torch.device) -> bool:
    info = build_info()  # None: the build left no record
    return torch.cuda.get_device_capability(device) == (9, 0) and (info is None or info.has_wgmma_code)
