"""Which architectures there are: where each one's code is, and how its config.json differs. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pagedinfer.distributed.group import Group
    from pagedinfer.models.causal_lm import CausalLM
    from pagedinfer.models.model_config import ModelConfig

Options = Mapping[str, Any]
"""A config.json, over the defaults of its family."""

Windows = Callable[[Options, int], int]
"""How many keys a layer sees (0: all), from the options and the layer's number."""


def no_window(options: Options, layer: int) -> int:
    return 0


def same_window(options: Options, layer: int) -> int:
    """Every layer has the window, if there is one."""
    return options.get("sliding_window") or 0


def window_if_used(options: Options, layer: int) -> int:
    """Every layer has the window, if use_sliding_window says so."""
    return same_window(options, layer) if options.get("use_sliding_window") else 0


def window_of_upper_layers(options: Options, layer: int) -> int:
    """As `window_if_used`, but only the layers from max_window_layers on, or those that layer_types lists."""
    if options.get("layer_types"):
        return window_by_layer_type(options, layer)
    return window_if_used(options, layer) if layer >= options.get("max_window_layers", 0) else 0


def window_by_layer_type(options: Options, layer: int) -> int:
    """layer_types lists each layer's; older files have every sliding_window_pattern-th layer without one."""
    types = options.get("layer_types")
    if types:
        slides = types[layer] == "sliding_attention"
    else:
        slides = (layer + 1) % options["sliding_window_pattern"] != 0
    return same_window(options, layer) if slides else 0


InnerSizes = Callable[[Options], Mapping[str, int]]
"""The inner sizes of the feed-forward blocks, by their names in config.json."""


def intermediate_size(options: Options) -> Mapping[str, int]:
    return {"intermediate_size": options["intermediate_size"]}


def ffn_dim(options: Options) -> Mapping[str, int]:
    return {"ffn_dim": options["ffn_dim"]}


def n_inner(options: Options) -> Mapping[str, int]:
    return {"n_inner": options.get("n_inner") or 4 * options["n_embd"]}


def of_experts_and_dense_layers(options: Options) -> Mapping[str, int]:
    return {name: options[name] for name in ("intermediate_size", "moe_intermediate_size")}


@dataclass(frozen=True, slots=True)
class Family:
    """What config.json means for one architecture."""

    module: str
    """Under pagedinfer.models; its class is named as the architecture."""
    models: str
    """Which models people know are of it, for the documentation."""
    peculiar: str
    """What sets it apart, likewise."""
    defaults: Options = field(default_factory=dict)
    """What a config.json of this family may leave out."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Its own word for a common option, where it has one: {"hidden_size": "n_embd"}."""
    window: Windows = no_window
    inner_sizes: InnerSizes = intermediate_size
    """What is divided among the ranks of tensor parallelism, beside the heads and the vocabulary."""
    has_rope: bool = True
    """Whether positions are rotated in, and not learned."""
    stretch_is_counted: bool = False
    """Whether max_position_embeddings has the stretch by RoPE scaling in it already."""


_LLAMA: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6}

_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[str, Family] = {
    "GPT2LMHeadModel": Family(
        "gpt2",
        "GPT-2",
        "learned positions, transposed weights",
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_positions": 1024,
            "tie_word_embeddings": True,
            "vocab_size": 50257,
        },
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        inner_sizes=n_inner,
        has_rope=False,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        "Gemma 2",
        "soft caps, alternating windows, four norms a layer",
        _GEMMA
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window_pattern": 2,
        },
        window=window_by_layer_type,
        stretch_is_counted=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        "Gemma 3, text only",
        "normalized heads, two rotary embeddings",
        _GEMMA
        | {
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "vocab_size": 262208,
        },
        window=window_by_layer_type,
        stretch_is_counted=True,
    ),
    "LlamaForCausalLM": Family(
        "llama",
        "Llama 2 and 3, TinyLlama, SmolLM, Yi and others",
        "grouped-query attention, optional biases",
        _LLAMA,
    ),
    "MistralForCausalLM": Family(
        "mistral",
        "Mistral 7B, Nemo, Small",
        "sliding window",
        _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window=same_window,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "Mixtral 8x7B, 8x22B",
        "mixture of experts in every layer",
        {
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        window=same_window,
    ),
    "OPTForCausalLM": Family(
        "opt",
        "OPT",
        "learned positions, norm before or after, projections in and out",
        {
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
        inner_sizes=ffn_dim,
        has_rope=False,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "Phi-3, Phi-3.5-mini, Phi-4",
        "fused projections, longrope, partial rotation",
        {"hidden_act": "silu", "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        window=same_window,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        "Qwen2, Qwen2.5",
        "bias on query, key and value; window in the upper layers",
        _LLAMA | {"max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096},
        window=window_of_upper_layers,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "Qwen3, dense",
        "normalized query and key heads",
        _LLAMA
        | {
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "sliding_window": 4096,
        },
        window=window_of_upper_layers,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "Qwen3, mixtures of experts",
        "1 to k of many experts, dense layers in between",
        _LLAMA
        | {
            "decoder_sparse_step": 1,
            "max_position_embeddings": 32768,
            "mlp_only_layers": (),
            "norm_topk_prob": False,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
        },
        window=window_if_used,
        inner_sizes=of_experts_and_dense_layers,
    ),
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
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
    group: Group | None = None,
) -> CausalLM:
    """The module of a configuration, its weights allocated but not filled; imports torch.

    Args:
        config: the model.
        dtype: of the weights, the activations and the KV cache.
        device: where the weights are; "meta" only lays the model out.
        max_model_len: positions that the rotary table has; the embeddings that adapt to the length of the
            context ("dynamic", "longrope") adapt to this one. Default: config.max_model_len.
        group: the ranks that share the model, of which this one gets its part; by default it is alone.

    Raises:
        ValueError: an option, or a head_dim, that is not supported, or sizes that the ranks cannot share.
    """
    from pagedinfer.distributed.group import SINGLE_RANK
    from pagedinfer.layers.placement import Placement

    module = import_module(f"pagedinfer.models.{find_family(config.architecture).module}")
    model: CausalLM = getattr(module, config.architecture)(
        config, Placement(dtype, device, group or SINGLE_RANK), max_model_len or config.max_model_len
    )
    return model
