"""Naive oracles of every op, in float64 and plain torch: slow, short, and right.

Each takes the arguments of the op of its name in pagedinfer/ops.py and returns what it should give.
"""

from __future__ import annotations

import torch
from torch import Tensor

# ---- attention -------------------------------------------------------------------------------------


# ---- cache -----------------------------------------------------------------------------------------


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """A new cache: the old one with the tokens' keys and values in their slots."""
    cache = kv_cache.clone()
    block_size = cache.shape[3]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            cache[slot // block_size, 0, :, slot % block_size] = key[t]
            cache[slot // block_size, 1, :, slot % block_size] = value[t]
    return cache


# ---- sampler ---------------------------------------------------------------------------------------


# ---- layers ----------------------------------------------------------------------------------------


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """float64, whatever the input's dtype."""
    x = input.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.double()
