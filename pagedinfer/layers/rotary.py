"""Rotary position embeddings (RoPE: Su et al., 2021) and the ways of stretching them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pagedinfer.layers.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines that `ops.rotary_store_kv` and `ops.rotary_embedding` rotate by."""

    cos_sin_cache: Tensor
    """float32 [max_model_len, rotary_dim]"""

    def __init__(self, rope: RopeConfig, *, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        if device.type == "meta":
            table = torch.empty((max_model_len, rope.rotary_dim), dtype=torch.float32, device=device)
        else:
            table = cos_sin_table(rope, max_model_len).to(device)
        self.register_buffer("cos_sin_cache", table, persistent=False)


def cos_sin_table(rope: RopeConfig, max_model_len: int) -> Tensor:
    """float32 [max_model_len, rotary_dim], on the CPU: cosines in the left half of a row, sines in the right.

    Frequencies and angles are rounded to float32, as they were where the checkpoints were trained: at
    position 10,000 that rounding moves a cosine by up to 1e-3, so more precise angles would be others.
    """
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(rope, max_model_len))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def rope_frequencies(rope: RopeConfig, max_model_len: int) -> Tensor:
    """float32 [rotary_dim / 2]: radians per token of each rotated pair.

    "dynamic" and "longrope" depend on the length of the context. That is max_model_len here, once and
    for all: a request's keys stay valid while it grows, and no request depends on another's length.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    match rope.rope_type:
        case "default":
            return 1.0 / rope.theta**exponents
        case "linear":
            return 1.0 / rope.theta**exponents / rope.factor
        case "dynamic":
            return 1.0 / _dynamic_theta(rope, max_model_len) ** exponents
        case "yarn":
            return _yarn_frequencies(rope, exponents)
        case "llama3":
            return _llama3_frequencies(rope, exponents)
        case "longrope":
            long = max_model_len > rope.original_max_position
            factors = torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
            return 1.0 / (factors * rope.theta**exponents)
        case unknown:
            raise ValueError(f"unknown rope_type {unknown!r}")


def _dynamic_theta(rope: RopeConfig, max_model_len: int) -> float:
    """A base that stretches the slowest pair by the context's length over the trained one."""
    stretch = max(max_model_len, rope.max_position) / rope.max_position
    return float(
        rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    )


def _yarn_frequencies(rope: RopeConfig, exponents: Tensor) -> Tensor:
    """YaRN (Peng et al., 2023, section 3.2): stretches slow pairs, keeps fast ones, blends in between."""

    def pair_that_turns(turns: float) -> float:
        """The pair, as a real number, that makes so many turns over the original context."""
        return (
            rope.rotary_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    wavelengths = rope.theta**exponents
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3_frequencies(rope: RopeConfig, exponents: Tensor) -> Tensor:
    """Llama 3.1: stretches pairs of long wavelength, keeps those of short, blends in between."""
    frequencies = 1.0 / rope.theta**exponents
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (
        rope.original_max_position / rope.low_freq_factor,
        rope.original_max_position / rope.high_freq_factor,
    )
    kept = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept) * frequencies / rope.factor + kept * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, stretched)
