"""Host arrays to device tensors, many in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels may read a piece of the transfer in vectors of this size


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors on `device` of these contiguous arrays, which all have one dtype.

    On the CPU they share the arrays' memory. On a GPU all go in one asynchronous copy on the current
    stream, from pinned memory that torch's allocator takes back once the copy has passed.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    step = _ALIGNMENT // arrays[0].itemsize
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.size // step) * step)
    dtype = torch.from_numpy(arrays[0][:0]).dtype
    staging = torch.empty(offsets[-1], dtype=dtype, pin_memory=True)
    host = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        host[offset : offset + array.size] = array.reshape(-1)
    packed = staging.to(device, non_blocking=True)
    return [
        packed[offset : offset + array.size].view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    ]


def pairs(mapping: Sequence[tuple[int, int]]) -> Tensor:
    """Pairs of block ids as the int64 [n, 2] CPU tensor that the cache ops take."""
    return torch.from_numpy(np.array(mapping, dtype=np.int64).reshape(-1, 2))
