"""How many parameters a model has, by what they do, from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import find_family

_OPT_POSITION_OFFSET = 2


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters."""

    embedding: int  # tables of tokens and positions, of which a step reads few rows
    head: int  # the matrix that gives logits; also in `embedding` if it is tied to that
    matrices: int  # of all layers, that every token goes through
    experts: int  # of all layers, of which a token goes through `active_experts`
    active_experts: int
    small: int  # norms and biases
    is_tied: bool
    expert_share: float  # of the experts, how many a token goes through

    @property
    def total(self) -> int:
        """All that is in memory."""
        return self.embedding + self.matrices + self.experts + self.small + (0 if self.is_tied else self.head)

    @property
    def a_token(self) -> int:
        """Those that one token is multiplied with in the layers."""
        return self.matrices + self.active_experts


@dataclass(frozen=True, slots=True)
class _Layer:
    matrices: int
    small: int
    experts: int = 0
    active_experts: int = 0


def count_parameters(config: ModelConfig) -> Parameters:
    """The parameters of a model, as the engine lays it out."""
    module = find_family(config.architecture).module
    count = _FAMILIES.get(module, _llama_layer)
    layers = [count(config, layer) for layer in range(config.num_layers)]
    embedding, head = _tables(config, module)
    experts = sum(layer.experts for layer in layers)
    active_experts = sum(layer.active_experts for layer in layers)
    matrices, small = _outside_layers(config, module)
    return Parameters(
        embedding=embedding,
        head=head,
        matrices=matrices + sum(layer.matrices for layer in layers),
        experts=experts,
        active_experts=active_experts,
        small=small + sum(layer.small for layer in layers),
        is_tied=config.tie_word_embeddings,
        expert_share=active_experts / experts if experts else 1.0,
    )


def rotary_table_bytes(config: ModelConfig, max_model_len: int) -> int:
    """Of the tables of sines and cosines, float32."""
    if not find_family(config.architecture).has_rope:
        return 0
    is_gemma3 = find_family(config.architecture).module == "gemma3"  # layers with a window have their own
    tables = len({window > 0 for window in config.layer_windows}) if is_gemma3 else 1
    return 4 * max_model_len * config.rope().rotary_dim * tables


def _tables(config: ModelConfig, module: str) -> tuple[int, int]:
    """The embeddings, and the head."""
    width = config.hidden_size
    positions = 0
    if module == "opt":
        width = config.options.get("word_embed_proj_dim") or config.hidden_size
        positions = (config.max_position_embeddings + _OPT_POSITION_OFFSET) * config.hidden_size
    elif module == "gpt2":
        positions = config.max_position_embeddings * config.hidden_size
    return config.vocab_size * width + positions, config.vocab_size * width


def _outside_layers(config: ModelConfig, module: str) -> tuple[int, int]:
    """Matrices beside the layers and the tables, and small parameters."""
    size, options = config.hidden_size, config.options
    if module != "opt":
        return 0, size * (2 if module == "gpt2" else 1)
    width = options.get("word_embed_proj_dim") or size
    has_norm = options["do_layer_norm_before"] and not options.get("_remove_final_layer_norm")
    return (2 * width * size if width != size else 0), (2 * size if has_norm else 0)


def _attention(config: ModelConfig, *, qkv_bias: bool, output_bias: bool) -> tuple[int, int]:
    """Matrices and biases."""
    size = config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = (query + 2 * key) * qkv_bias + size * output_bias
    return size * (query + 2 * key) + query * size, biases


def _gated_mlp(config: ModelConfig, inner: int, *, bias: bool = False) -> tuple[int, int]:
    return 3 * config.hidden_size * inner, (2 * inner + config.hidden_size) * bias


def _experts(config: ModelConfig, inner: int, count: int) -> tuple[int, int, int]:
    """Those of all experts, of those that a token goes through, and the router."""
    each = 3 * config.hidden_size * inner
    return count * each, config.options["num_experts_per_tok"] * each, config.hidden_size * count


def _llama_layer(config: ModelConfig, layer: int) -> _Layer:
    bias = bool(config.options.get("attention_bias", False))
    attention, attention_bias = _attention(config, qkv_bias=bias, output_bias=bias)
    mlp, mlp_bias = _gated_mlp(
        config, config.options["intermediate_size"], bias=bool(config.options.get("mlp_bias", False))
    )
    return _Layer(attention + mlp, 2 * config.hidden_size + attention_bias + mlp_bias)


def _qwen2_layer(config: ModelConfig, layer: int) -> _Layer:
    attention, bias = _attention(config, qkv_bias=True, output_bias=False)
    mlp, mlp_bias = _gated_mlp(
        config, config.options["intermediate_size"], bias=bool(config.options.get("mlp_bias", False))
    )
    return _Layer(attention + mlp, 2 * config.hidden_size + bias + mlp_bias)


def _qwen3_layer(config: ModelConfig, layer: int) -> _Layer:
    plain = _llama_layer(config, layer)
    return _Layer(plain.matrices, plain.small + 2 * config.head_dim)


def _phi3_layer(config: ModelConfig, layer: int) -> _Layer:
    attention, _ = _attention(config, qkv_bias=False, output_bias=False)
    mlp, _ = _gated_mlp(config, config.options["intermediate_size"])
    return _Layer(attention + mlp, 2 * config.hidden_size)


def _mixtral_layer(config: ModelConfig, layer: int) -> _Layer:
    options = config.options
    bias = bool(options.get("attention_bias", False))
    attention, small = _attention(config, qkv_bias=bias, output_bias=bias)
    experts, active, router = _experts(config, options["intermediate_size"], options["num_local_experts"])
    return _Layer(attention + router, 2 * config.hidden_size + small, experts, active)


def _qwen3_moe_layer(config: ModelConfig, layer: int) -> _Layer:
    options = config.options
    sparse = (layer + 1) % options["decoder_sparse_step"] == 0
    if not sparse or layer in (options["mlp_only_layers"] or ()):
        attention = _qwen3_attention(config)
        mlp, _ = _gated_mlp(config, options["intermediate_size"])
        return _Layer(attention[0] + mlp, attention[1])
    matrices, small = _qwen3_attention(config)
    count = options.get("num_experts") or options["num_local_experts"]
    experts, active, router = _experts(config, options["moe_intermediate_size"], count)
    return _Layer(matrices + router, small, experts, active)


def _qwen3_attention(config: ModelConfig) -> tuple[int, int]:
    """Matrices; norms and biases, the layer's own included."""
    bias = bool(config.options.get("attention_bias", False))
    attention, small = _attention(config, qkv_bias=bias, output_bias=bias)
    return attention, small + 2 * config.head_dim + 2 * config.hidden_size


def _gemma2_layer(config: ModelConfig, layer: int) -> _Layer:
    bias = bool(config.options.get("attention_bias", False))
    attention, small = _attention(config, qkv_bias=bias, output_bias=bias)
    mlp, _ = _gated_mlp(config, config.options["intermediate_size"])
    return _Layer(attention + mlp, 4 * config.hidden_size + small)


def _gemma3_layer(config: ModelConfig, layer: int) -> _Layer:
    plain = _gemma2_layer(config, layer)
    return _Layer(plain.matrices, plain.small + 2 * config.head_dim)


def _opt_layer(config: ModelConfig, layer: int) -> _Layer:
    size, inner = config.hidden_size, config.options["ffn_dim"]
    bias = bool(config.options["enable_bias"])
    return _Layer(4 * size * size + 2 * size * inner, 4 * size + (5 * size + inner) * bias)


def _gpt2_layer(config: ModelConfig, layer: int) -> _Layer:
    size = config.hidden_size
    inner = config.options.get("n_inner") or 4 * size
    return _Layer(4 * size * size + 2 * size * inner, 4 * size + 5 * size + inner)


_FAMILIES: dict[str, Callable[[ModelConfig, int], _Layer]] = {
    "gemma2": _gemma2_layer,
    "gemma3": _gemma3_layer,
    "gpt2": _gpt2_layer,
    "mixtral": _mixtral_layer,
    "opt": _opt_layer,
    "phi3": _phi3_layer,
    "qwen2": _qwen2_layer,
    "qwen3": _qwen3_layer,
    "qwen3_moe": _qwen3_moe_layer,
}
"""By module; the others are laid out as Llama is."""
