"""Naive oracles of every op, in float64 and plain torch: slow, short, and right.

Each takes the arguments of the op of its name in pagedinfer/ops.py and returns what it should give.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer.ops import LogitsChange, LogitsChanges

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
    """float64 [num_tokens, num_heads, head_dim] on the CPU: gather, mask, softmax, a sequence at a time."""
    num_tokens, num_heads, head_dim = query.shape
    block_size = kv_cache.shape[3]
    group = num_heads // kv_cache.shape[2]
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        positions = torch.arange(seq_len - (rows.stop - rows.start), seq_len)
        if len(positions) == 0 or seq_len == 0:
            continue
        first = max(0, int(positions[0]) - sliding_window + 1) if sliding_window else 0
        keys = torch.arange(first, seq_len)
        block = block_table[i].cpu().long()[keys // block_size]
        offset = keys % block_size
        # [keys, 2, kv heads, head_dim] -> K and V, each [keys, heads, head_dim]
        kv = kv_cache[block.to(kv_cache.device), :, :, offset.to(kv_cache.device)].double().cpu()
        key, value = kv.repeat_interleave(group, dim=2).unbind(1)
        scores = scale * torch.einsum("qhd,thd->hqt", query[rows].double().cpu(), key)
        if logit_cap:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        seen = keys <= positions[:, None]
        if sliding_window:
            seen &= keys > positions[:, None] - sliding_window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        weights[:, positions < 0] = 0  # no key: zeros
        out[rows] = torch.einsum("hqt,thd->qhd", weights, value)
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


def copy_blocks(kv_cache: Tensor, mapping: Tensor) -> Tensor:
    """A new cache: every source is read from the old one."""
    cache = kv_cache.clone()
    for source, destination in mapping.tolist():
        cache[destination] = kv_cache[source]
    return cache


def swap_blocks(source: Tensor, destination: Tensor, mapping: Tensor) -> Tensor:
    """A new destination, on the old one's device."""
    swapped = destination.clone()
    for source_block, destination_block in mapping.tolist():
        swapped[destination_block] = source[source_block].to(destination.device)
    return swapped


# ---- sampler ---------------------------------------------------------------------------------------
# Not a float64 oracle but the same arithmetic, spelled out again: which tokens are kept and drawn is
# defined bit for bit (docs/sampling.md).

Float32 = npt.NDArray[np.float32]


def fused_multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c in float32, rounded once.

    In float64 the product is exact and the sum has an error that can be had exactly (Knuth's two-sum).
    Rounding that sum to odd before the last rounding makes two roundings as good as one (Boldo and
    Melquiond, 2008).
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact_even = (error != 0) & (total.view(np.int64) & 1 == 0)
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact_even, np.nextafter(total, toward), total).astype(np.float32)


def exponential(z: Float32) -> Float32:
    """exp(z), z <= 0, as the kernels compute it; 0 below -44."""
    f = np.float32
    magic = np.full_like(z, 1.5 * 2**23)
    z = np.where(z >= f(-44), z, f(-50))
    shifted = fused_multiply_add(z, np.full_like(z, float.fromhex("0x1.715476p+0")), magic)
    n = shifted - magic
    r = fused_multiply_add(n, np.full_like(z, -float.fromhex("0x1.62e43p-1")), z)
    s = np.full_like(z, float.fromhex("0x1.10627cp-7"))
    for coefficient in ("0x1.572a02p-5", "0x1.5557aep-3", "0x1.fffdfcp-2"):
        s = fused_multiply_add(s, r, np.full_like(z, float.fromhex(coefficient)))
    power = f(1) + fused_multiply_add(r * r, s, r)
    return np.where(z >= f(-44), np.ldexp(power, n.astype(np.int32)), f(0))


def token_weights(e: Float32) -> npt.NDArray[np.uint64]:
    """floor(e * 2^44); the product is exact in float64."""
    return np.floor(e.astype(np.float64) * 2.0**44).astype(np.uint64)


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon et al., 2011."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ k0,
            right & 0xFFFFFFFF,
            (left >> 32) ^ c3 ^ k1,
            left & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(seed: int, position: int) -> int:
    """The 64 random bits of a seed's choice at a position."""
    seed, position = seed % 2**64, position % 2**64
    words = philox4x32_10(
        (position % 2**32, position >> 32, 0, 0),
        (seed % 2**32, seed >> 32),
    )
    return words[0] | words[1] << 32


def kept_tokens(
    x: Float32, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """What the filters leave of a valid row, as ids in falling order of logits, and all tokens' weights."""
    order = np.argsort(-x, kind="stable")
    inverse_temperature = np.float32(1) / np.float32(temperature)
    with np.errstate(over="ignore", invalid="ignore"):
        e = exponential((x - x.max()) * inverse_temperature)
    weights = token_weights(e)
    kept = order[:top_k] if 0 < top_k < len(x) else order
    if np.float32(top_p) < 1:
        sums = np.cumsum(weights[kept], dtype=np.uint64)
        share = math.floor(float(np.float32(top_p)) * 2**32 + 0.5)
        target = max(int(sums[-1]) * share >> 32, 1)
        kept = kept[: int(np.searchsorted(sums, np.uint64(target))) + 1]
    if min_p > 0:
        kept = kept[e[kept] >= np.float32(min_p)]
    return kept, weights


def sample_row(
    x: Float32, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """The token of one row of logits, -1 if it cannot be sampled."""
    if not (x < np.inf).all() or x.max() == -np.inf:
        return -1
    if np.float32(temperature) < np.float32(1e-5):
        return int(np.argmax(x))
    kept, weights = kept_tokens(x, temperature, top_k, top_p, min_p)
    kept = np.sort(kept)
    sums = np.cumsum(weights[kept], dtype=np.uint64)
    r = random_bits(seed, position) * int(sums[-1]) >> 64
    return int(kept[np.searchsorted(sums, np.uint64(r), side="right")])


def changed_logits(x: Float32, slot: int, changes: LogitsChanges) -> Float32:
    """What a slot's mask, biases and penalties make of one row of logits."""
    y = x.copy()
    kinds = LogitsChange(int(changes.kinds[slot]))
    banned = np.zeros(len(x), bool)
    if LogitsChange.MASK in kinds and changes.allowed is not None:
        words = changes.allowed[slot].cpu().numpy().view(np.uint32)
        banned = ~np.unpackbits(words.view(np.uint8), bitorder="little")[: len(x)].astype(bool)
    if LogitsChange.BIAS in kinds:
        for token, bias in zip(changes.bias_ids[slot].tolist(), changes.bias[slot].tolist(), strict=True):
            if 0 <= token < len(x):
                y[token] += np.float32(bias)
    if LogitsChange.PENALTIES in kinds and changes.token_counts is not None:
        counts = changes.token_counts[slot, : len(x)].cpu().numpy()
        repetition, presence, frequency = (
            np.float32(penalty[slot].item())
            for penalty in (changes.repetition_penalty, changes.presence_penalty, changes.frequency_penalty)
        )
        seen, times = counts != 0, counts & 0x7FFF
        y = np.where(seen, np.where(y > 0, y / repetition, y * repetition), y)
        y = np.where(times > 0, y - frequency * times.astype(np.float32) - presence, y)
    return np.where(banned, np.float32(-np.inf), y)


def sample_tokens(
    logits: Tensor,
    slots: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int | None = None,
    changes: LogitsChanges | None = None,
) -> tuple[Tensor, Tensor]:
    """The drawn ids, and their log-probabilities in float64. Counts nothing."""
    x = logits[:, :vocab_size].float().cpu()
    token_ids = torch.full((len(x),), -1, dtype=torch.int64)
    logprobs = torch.zeros(len(x), dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        parameters = (p[slot].item() for p in (temperature, top_k, top_p, min_p, seeds, positions))
        changed = x[row].numpy() if changes is None else changed_logits(x[row].numpy(), slot, changes)
        token_ids[row] = token = sample_row(changed, *parameters)
        logprobs[row] = x[row].double().log_softmax(-1)[token] if token >= 0 else math.nan
    return token_ids, logprobs


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, *, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities (float64), ranks, the best ids and theirs (float64)."""
    x = logits[:, :vocab_size].double().cpu()
    num_rows = len(x)
    logprobs = torch.full((num_rows,), math.nan, dtype=torch.float64)
    ranks = torch.zeros(num_rows, dtype=torch.int64)
    top_ids = torch.full((num_rows, num_top), -1)
    top = torch.full((num_rows, num_top), math.nan, dtype=torch.float64)
    for row, token in enumerate(token_ids.tolist()):
        if not 0 <= token < x.shape[1] or not (x[row] < math.inf).all() or x[row].max() == -math.inf:
            continue
        log_softmax = x[row].log_softmax(-1)
        order = (-x[row]).argsort(stable=True)
        logprobs[row] = log_softmax[token]
        ranks[row] = order.tolist().index(token) + 1
        best = order[x[row][order] > -math.inf][:num_top]
        top[row] = -math.inf
        top_ids[row, : len(best)] = best
        top[row, : len(best)] = log_softmax[best]
    return logprobs, ranks, top_ids, top


# ---- layers ----------------------------------------------------------------------------------------


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """float64, whatever the input's dtype."""
    x = input.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.double()


def rms_norm_residual(
    input: Tensor, weight: Tensor, epsilon: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The output in float64, and the new residual in the input's dtype."""
    residual = (residual.double() + input.double()).to(input.dtype)
    return rms_norm(residual, weight, epsilon), residual


def cos_sin_table(max_position: int, rotary_dim: int) -> Tensor:
    """float32 [max_position, rotary_dim]: cosines, then sines, of a base of 10,000."""
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(max_position), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rotary_embedding(
    positions: Tensor, heads: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> Tensor:
    """Query or key, rotated, in float64; a pair is a complex number, and rotation a product."""
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache.double()[positions].unsqueeze(1).split(half, dim=-1)
    rotated = heads.double()
    pairs = rotated[..., : 2 * half].reshape(*heads.shape[:2], *((half, 2) if interleaved else (2, half)))
    pair_dim = -1 if interleaved else -2
    x, y = pairs.unbind(pair_dim)
    turned = torch.complex(x, y) * torch.complex(cos, sin)
    rotated[..., : 2 * half] = torch.stack((turned.real, turned.imag), dim=pair_dim).flatten(-2)
    return rotated


def silu_and_mul(input: Tensor) -> Tensor:
    """float64, whatever the input's dtype."""
    gate, up = input.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
