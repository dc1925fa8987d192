"""Which architectures there are: where each one's code is, and how its config.json differs. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pagedinfer.models.causal_lm import CausalLM
    from pagedinfer.models.model_config import ModelConfig

Options = Mapping[str, Any]
"""A config.json, over the defaults of its family."""

Windows = Callable[[Options, int], int]
"""How many keys a layer sees (0: all), from the options and the layer's number."""


def no_window(options: Options, layer: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Family:
    """What config.json means for one architecture."""

    module: str
    """Under pagedinfer.models; its class is named as the architecture."""
    defaults: Options = field(default_factory=dict)
    """What a config.json of this family may leave out. null counts as left out."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Its own word for a common option, where it has one: {"hidden_size": "n_embd"}."""
    window: Windows = no_window
    has_rope: bool = True
    """Whether positions are rotated in, and not learned."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", {"hidden_act": "silu", "rms_norm_eps": 1e-6}),
}


def find_family(architecture: str) -> Family:
    """The family of a name in config.json's `architectures`.

    Raises:
        ValueError: an unknown one; the message lists the known ones.
    """
    if architecture not in FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[architecture]


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, max_model_len: int | None = None
) -> CausalLM:
    """The module of a configuration, its weights allocated but not filled; imports torch.

    Args:
        config: the model.
        dtype: of the weights, the activations and the KV cache.
        device: where the weights are; "meta" only lays the model out.
        max_model_len: positions that the rotary table has; the embeddings that adapt to the length of the
            context ("dynamic", "longrope") adapt to this one. Default: config.max_model_len.

    Raises:
        ValueError: an option, or a head_dim, that is not supported.
    """
    from pagedinfer.layers.placement import Placement

    module = import_module(f"pagedinfer.models.{find_family(config.architecture).module}")
    model: CausalLM = getattr(module, config.architecture)(
        config, Placement(dtype, device), max_model_len or config.max_model_len
    )
    return model
