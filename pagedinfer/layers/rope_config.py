"""The rotary embedding that a config.json asks for, in one form whatever its spelling. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}

ROPE_TYPES: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # says how the checkpoint was made, not how it runs
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
}
"""The known types of scaling, each with the keys that it understands."""

_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding. Fields that a type does not use keep their defaults."""

    rope_type: str
    theta: float
    """Base of the frequencies."""
    rotary_dim: int
    """How many elements of a head are rotated; even, at most head_dim."""
    max_position: int
    """max_position_embeddings of the checkpoint."""
    original_max_position: int
    """The context that the model was trained with before it was stretched."""
    factor: float = 1.0
    """How far the context is stretched."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def context_length(self) -> int:
        """Tokens that the model is meant for, with the stretch."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position, int(self.original_max_position * self.factor))
        return self.max_position

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        head_dim: int,
        max_position: int,
        default_theta: float = 10000.0,
        layer_type: str | None = None,
    ) -> RopeConfig:
        """Reads `rope_parameters`, or `rope_scaling` and `rope_theta`, of a config.json.

        Args:
            config: the parsed config.json.
            head_dim: elements of a head.
            max_position: the checkpoint's max_position_embeddings.
            default_theta: the family's base, if the config gives none.
            layer_type: which entry to take where the config has one for each type of layer.

        Raises:
            ValueError: an unknown type of scaling, a key that its type does not know, one that is missing,
                or one of a wrong value.
        """
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if layer_type is not None and layer_type in parameters:
            parameters = dict(parameters[layer_type] or {})
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        rope_type = _OLD_NAMES.get(rope_type, rope_type)
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"unknown rope_type {rope_type!r}; known are {', '.join(ROPE_TYPES)}")
        unknown = set(parameters) - ROPE_TYPES[rope_type] - _COMMON_KEYS
        if unknown:
            raise ValueError(f"rope_type {rope_type!r} does not know {', '.join(sorted(unknown))}")

        def number(name: str, default: float | None = None) -> float:
            value = parameters.get(name)
            if value is None:
                value = default
            if value is None:
                raise ValueError(f"rope_type {rope_type!r} needs {name}, and the config has none")
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} of rope_type {rope_type!r} must be a number > 0, got {value!r}")
            return float(value)

        theta = number("rope_theta", config.get("rope_theta") or default_theta)
        partial = number("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
        rotary_dim = int(head_dim * partial)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {rotary_dim} elements; "
                f"it must be an even number in [2, {head_dim}]"
            )
        original = int(
            config.get("original_max_position_embeddings")
            or number("original_max_position_embeddings", max_position)
        )
        shared: dict[str, Any] = {
            "rope_type": rope_type,
            "theta": theta,
            "rotary_dim": rotary_dim,
            "max_position": max_position,
            "original_max_position": original,
        }
        match rope_type:
            case "linear" | "dynamic":
                return cls(**shared, factor=number("factor"))
            case "llama3":
                return cls(
                    **shared,
                    factor=number("factor"),
                    low_freq_factor=number("low_freq_factor"),
                    high_freq_factor=number("high_freq_factor"),
                )
            case "yarn":
                factor = number("factor", max_position / original)
                return cls(
                    **shared,
                    factor=factor,
                    attention_factor=number("attention_factor", _yarn_attention_factor(factor, parameters)),
                    beta_fast=number("beta_fast", 32.0),
                    beta_slow=number("beta_slow", 1.0),
                    truncate=bool(parameters.get("truncate", True)),
                )
            case "longrope":
                factor = number("factor", max_position / original)
                scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
                return cls(
                    **shared,
                    factor=factor,
                    attention_factor=number("attention_factor", scale),
                    short_factor=_factors("short_factor", parameters, rotary_dim // 2),
                    long_factor=_factors("long_factor", parameters, rotary_dim // 2),
                )
            case _:
                return cls(**shared)


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    """The temperature of YaRN (Peng et al., 2023, section 3.4), or the ratio of two of them."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _factors(name: str, parameters: Mapping[str, Any], length: int) -> tuple[float, ...]:
    values = parameters.get(name)
    if not isinstance(values, Sequence) or len(values) != length:
        found = len(values) if isinstance(values, Sequence) else values
        raise ValueError(f"{name} of rope_type 'longrope' must be a list of {length} numbers, got {found}")
    return tuple(float(value) for value in values)
