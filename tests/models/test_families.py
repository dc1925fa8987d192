"""Every family against transformers, on small random models that exercise what is peculiar to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import FAMILIES, build_model
from pagedinfer.models.weights import load_weights
from tests.models.families import CASES, GEMMA, GPT2, OPT, ROTARY, architecture_of, make
from tests.models.harness import PagedModel
from tests.models.parity import TOLERANCE, check_half, check_parity, random_prompts, transformers_logits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check_parity(tmp_path, make(tmp_path, *CASES[name]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Llama, nine heads on three", "GPT-2", "Gemma 2", "Qwen3-MoE"])
def test_half_types(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_half(tmp_path, make(tmp_path, *CASES[name]), dtype)


def test_every_family_is_tested() -> None:
    tested = {architecture_of(config_class) for config_class, _ in CASES.values()}
    assert tested == set(FAMILIES)


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
        ("LlamaConfig", ROTARY | {"hidden_act": "tanh"}, "unknown gated activation 'tanh'; known are silu"),
        ("LlamaConfig", ROTARY | {"head_dim": 48}, "head_dim 48 is not supported; supported are 64, 80"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(
    config_class: str, options: dict[str, Any], message: str
) -> None:
    hf_config = getattr(transformers, config_class)(**options)
    hf_config.architectures = [architecture_of(config_class)]
    with pytest.raises(ValueError, match=message):
        build_model(ModelConfig.from_dict(hf_config.to_dict()), torch.float32, torch.device("meta"))
