"""The tables of cosines and sines against transformers', for every type and spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedinfer.layers.rope_config import RopeConfig
from pagedinfer.layers.rotary import cos_sin_table

HEAD_DIM, MAX_POSITION, LENGTH = 64, 128, 1024

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn, attention_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 64,
    },
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}


def spelled(scaling: dict[str, Any], spelling: str, theta: float) -> dict[str, Any]:
    """The same rotary embedding in one of the three ways in which config.json files say it."""
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    rest = {key: value for key, value in scaling.items() if key != "rope_type"}
    return {"rope_theta": theta, "rope_scaling": {spelling: scaling["rope_type"], **rest}}


def transformers_table(config: dict[str, Any], length: int) -> torch.Tensor:
    hf_config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        **config,
    )
    rotary = LlamaRotaryEmbedding(hf_config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


# vllm#9481, vllm#48621
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_equals_transformers_beyond_the_original_length(name: str, spelling: str, theta: float) -> None:
    config = spelled(SCALINGS[name], spelling, theta)
    rope = RopeConfig.from_config(config, head_dim=HEAD_DIM, max_position=MAX_POSITION)
    expected = transformers_table(config, LENGTH)
    if name == "partial":  # Llama's own module has no partial rotation: rotate a smaller head in full
        config = spelled({"rope_type": "default"}, spelling, theta)
        expected = transformers_table_of_head(HEAD_DIM // 2, config)
    table = cos_sin_table(rope, LENGTH)
    assert table.dtype == torch.float32
    assert table.shape == expected.shape
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)


def transformers_table_of_head(head_dim: int, config: dict[str, Any]) -> torch.Tensor:
    hf_config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, **config)
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), torch.arange(LENGTH)[None])
    return torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_short_contexts_are_not_stretched(name: str) -> None:
    config = spelled(SCALINGS[name], "rope_parameters", 10000.0)
    rope = RopeConfig.from_config(config, head_dim=HEAD_DIM, max_position=MAX_POSITION)
    torch.testing.assert_close(cos_sin_table(rope, 64), transformers_table(config, 64), rtol=0, atol=1e-5)


def test_old_name_of_longrope() -> None:
    config = spelled(SCALINGS["longrope"] | {"rope_type": "su"}, "type", 10000.0)
    rope = RopeConfig.from_config(config, head_dim=HEAD_DIM, max_position=MAX_POSITION)
    assert rope.rope_type == "longrope"


def test_one_entry_for_each_type_of_layer() -> None:
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }

    def rope(layer_type: str) -> RopeConfig:
        return RopeConfig.from_config(
            config, head_dim=HEAD_DIM, max_position=MAX_POSITION, layer_type=layer_type
        )

    assert (rope("full_attention").rope_type, rope("full_attention").theta) == ("linear", 1e6)
    assert (rope("sliding_attention").rope_type, rope("sliding_attention").theta) == ("default", 1e4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "ntk-by-parts"}, "unknown rope_type 'ntk-by-parts'.*linear.*yarn"),
        ({"type": "mrope", "mrope_section": [1]}, "unknown rope_type 'mrope'"),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "mrope_section"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "linear", "factor": 0}, "factor .* must be a number > 0, got 0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 32}, "list of 32 .* got 1"),
        ({"rope_type": "default", "partial_rotary_factor": 0.55}, "rotates 35 elements"),
    ],
)
def test_what_is_not_known_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_config({"rope_parameters": parameters}, head_dim=HEAD_DIM, max_position=MAX_POSITION)


def test_context_length_includes_the_stretch() -> None:
    def length(name: str) -> int:
        config = spelled(SCALINGS[name], "rope_parameters", 10000.0)
        return RopeConfig.from_config(config, head_dim=HEAD_DIM, max_position=MAX_POSITION).context_length

    assert [length(name) for name in ("default", "linear", "dynamic", "yarn", "llama3", "longrope")] == [
        128, 512, 256, 256, 128, 128,
    ]  # fmt: skip
