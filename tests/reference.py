"""Naive oracles of every op, in float64 and plain torch: slow, short, and right.

Each takes the arguments of the op of its name in pagedinfer/ops.py and returns what it should give.
"""

from __future__ import annotations

import torch
from torch import Tensor

# ---- attention -------------------------------------------------------------------------------------


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    """float64 [num_tokens, num_heads, head_dim] on the CPU: gather, mask, softmax, one query at a time."""
    num_tokens, num_heads, head_dim = query.shape
    block_size = kv_cache.shape[3]
    group = num_heads // kv_cache.shape[2]
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[i + 1] - starts[i]
        if query_len == 0 or seq_len == 0:
            continue
        blocks = block_table[i, : -(-seq_len // block_size)].long()
        # [blocks, 2, kv heads, block_size, head_dim] -> K and V [heads, seq_len, head_dim]
        kv = kv_cache[blocks].double().cpu().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
        key, value = kv.repeat_interleave(group, dim=1)
        for j in range(query_len):
            end = seq_len - query_len + j + 1
            first = max(0, end - sliding_window) if sliding_window else 0
            if end <= 0:
                continue
            q = query[starts[i] + j].double().cpu()
            scores = scale * torch.einsum("hd,htd->ht", q, key[:, first:end])
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            out[starts[i] + j] = torch.einsum("ht,htd->hd", scores.softmax(-1), value[:, first:end])
    return out


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
