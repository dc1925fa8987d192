"""Every family against transformers, on small random models that exercise what is peculiar to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import FAMILIES, build_model
from pagedinfer.models.weights import load_weights
from tests.models.harness import PagedModel
from tests.models.parity import TOLERANCE, check_parity, random_prompts, transformers_logits
from tests.tiny_models import BOS, EOS, PAD, VOCAB_SIZE, make_model

ROTARY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
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
    specials = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return make_model(path, getattr(transformers, config_class)(**options | specials))


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_parity(tmp_path, make(tmp_path, *CASES[name]))


def test_every_family_is_tested() -> None:
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    tested = {mapping[getattr(transformers, config_class).model_type] for config_class, _ in CASES.values()}
    assert tested | {"LlamaForCausalLM"} == set(FAMILIES)


# transformers#39408, vllm#3385
@pytest.mark.parametrize("length", range(3, 11))
def test_window_is_neither_wider_nor_narrower(length: int, tmp_path: Path) -> None:
    reference = make(tmp_path, "MistralConfig", ROTARY | {"sliding_window": 4})
    config = ModelConfig.from_pretrained(tmp_path)
    model = build_model(config, torch.float32, torch.device("cpu"))
    load_weights(model, tmp_path, use_tqdm=False)
    paged = PagedModel(model, config, torch.device("cpu"), torch.float32)
    [prompt] = random_prompts((length,))
    expected = transformers_logits(reference, prompt)
    for chunk in (None, 1):
        [found] = paged.logits([prompt], chunk=chunk)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("long", [False, True])
def test_longrope_adapts_to_the_longest_context(long: bool, tmp_path: Path) -> None:
    """transformers takes the factors by the length of what it is given, the engine once for all."""
    reference = make(
        tmp_path,
        "Phi3Config",
        ROTARY
        | {
            "hidden_size": 256,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.02 * i for i in range(32)],
                "long_factor": [2.0 + 0.5 * i for i in range(32)],
            },
        },
    )
    config = ModelConfig.from_pretrained(tmp_path)
    model = build_model(config, torch.float32, torch.device("cpu"), max_model_len=512 if long else 32)
    load_weights(model, tmp_path, use_tqdm=False)
    paged = PagedModel(model, config, torch.device("cpu"), torch.float32)
    [prompt] = random_prompts((60 if long else 30,))
    [found] = paged.logits([prompt], chunk=7)
    torch.testing.assert_close(found, transformers_logits(reference, prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("config_class", "options", "message"),
    [
        ("OPTConfig", OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("GPT2Config", GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        ("GPT2Config", GPT2 | {"activation_function": "tanh"}, "unknown activation 'tanh'; known are relu"),
        ("Gemma3TextConfig", GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma3TextConfig", GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(
    config_class: str, options: dict[str, Any], message: str
) -> None:
    hf_config = getattr(transformers, config_class)(**options)
    architectures = {"OPTConfig": "OPTForCausalLM", "GPT2Config": "GPT2LMHeadModel"}
    hf_config.architectures = [architectures.get(config_class, "Gemma3ForCausalLM")]
    with pytest.raises(ValueError, match=message):
        build_model(ModelConfig.from_dict(hf_config.to_dict()), torch.float32, torch.device("meta"))
