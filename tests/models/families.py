"""Small random models of every family, each exercising what is peculiar to it: what the parity tests run.

docs/models.md lists them; scripts/model_table.py writes that table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from tests.tiny_models import LLAMA, SPECIALS, VOCAB_SIZE, make_model

ROTARY = LLAMA  # what all families with rotary embeddings read
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
}
OPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "ffn_dim": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = ROTARY | {"num_hidden_layers": 3, "tie_word_embeddings": True, "query_pre_attn_scalar": 100}
FULL_AND_SLIDING = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MIXTRAL = ROTARY | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
QWEN3_MOE = ROTARY | {"num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", ROTARY),
    "Llama, multi-head, head_dim 80": ("LlamaConfig", ROTARY | {"num_key_value_heads": 4, "head_dim": 80}),
    "Llama, multi-query, head_dim 96": ("LlamaConfig", ROTARY | {"num_key_value_heads": 1, "head_dim": 96}),
    "Llama, nine heads on three": (
        "LlamaConfig",
        ROTARY | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
    ),
    "Llama, tied": ("LlamaConfig", ROTARY | {"tie_word_embeddings": True}),
    "Llama, biases": ("LlamaConfig", ROTARY | {"attention_bias": True, "mlp_bias": True}),
    "Llama, head_dim 128, theta": (
        "LlamaConfig",
        ROTARY | {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "Llama, llama3 scaling": (
        "LlamaConfig",
        ROTARY
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "Llama, yarn": (
        "LlamaConfig",
        ROTARY
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "Llama, epsilon": ("LlamaConfig", ROTARY | {"rms_norm_eps": 0.1}),
    "Qwen2": ("Qwen2Config", ROTARY | {"hidden_size": 256}),
    "Qwen2, tied": ("Qwen2Config", ROTARY | {"hidden_size": 256, "tie_word_embeddings": True}),
    "Qwen2, window in upper layers": (
        "Qwen2Config",
        ROTARY
        | {
            "hidden_size": 256,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "Qwen2, window not used": (
        "Qwen2Config",
        ROTARY | {"hidden_size": 256, "sliding_window": 9, "max_window_layers": 0},
    ),
    "Qwen3": ("Qwen3Config", ROTARY | {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "Qwen3, biases": ("Qwen3Config", ROTARY | {"attention_bias": True, "head_dim": 80}),
    "Mistral": ("MistralConfig", ROTARY | {"sliding_window": 13}),
    "Mistral, window of 4": ("MistralConfig", ROTARY | {"sliding_window": 4, "num_key_value_heads": 1}),
    "Mistral, no window": ("MistralConfig", ROTARY | {"sliding_window": None}),
    "OPT": ("OPTConfig", OPT),
    "OPT, norm after": ("OPTConfig", OPT | {"do_layer_norm_before": False}),
    "OPT, projected": ("OPTConfig", OPT | {"word_embed_proj_dim": 64}),
    "OPT, no biases": ("OPTConfig", OPT | {"enable_bias": False, "activation_function": "gelu"}),
    "GPT-2": ("GPT2Config", GPT2),
    "GPT-2, scaled by layer": (
        "GPT2Config",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96, "activation_function": "relu"},
    ),
    "GPT-2, not scaled": ("GPT2Config", GPT2 | {"scale_attn_weights": False}),
    "Phi-3": ("Phi3Config", ROTARY | {"hidden_size": 256, "sliding_window": 20}),
    "Phi-3, partial": (
        "Phi3Config",
        ROTARY
        | {"hidden_size": 320, "head_dim": 80}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.4,
            }
        },
    ),
    "Gemma 2": ("Gemma2Config", GEMMA | {"sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "Gemma 2, no caps": (
        "Gemma2Config",
        GEMMA
        | {
            "sliding_window": 9,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 256,
        },
    ),
    "Gemma 3": (
        "Gemma3TextConfig",
        GEMMA | {"sliding_window": 9, "sliding_window_pattern": 2, "rope_parameters": FULL_AND_SLIDING},
    ),
    "Gemma 3, logits capped": (
        "Gemma3TextConfig",
        GEMMA | {"sliding_window": 9, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
    ),
    "Mixtral": ("MixtralConfig", MIXTRAL),
    "Mixtral, top 1, window": ("MixtralConfig", MIXTRAL | {"num_experts_per_tok": 1, "sliding_window": 9}),
    "Mixtral, all experts": ("MixtralConfig", MIXTRAL | {"num_experts_per_tok": 4}),
    "Qwen3-MoE": ("Qwen3MoeConfig", QWEN3_MOE),
    "Qwen3-MoE, top 8, normalized": (
        "Qwen3MoeConfig",
        QWEN3_MOE | {"num_experts": 16, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "Qwen3-MoE, top 1, some dense": (
        "Qwen3MoeConfig",
        QWEN3_MOE
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts_per_tok": 1,
        },
    ),
}


def make(path: Path, config_class: str, options: dict[str, Any]) -> PreTrainedModel:
    return make_model(path, getattr(transformers, config_class)(**options | SPECIALS))


def architecture_of(config_class: str) -> str:
    """What config.json calls the model of a configuration class."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architecture: str = names[getattr(transformers, config_class).model_type]
    return architecture
