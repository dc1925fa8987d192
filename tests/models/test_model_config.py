from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from tests.tiny_models import make_llama

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}


def test_reads_what_transformers_writes(tmp_path: Path) -> None:
    reference = make_llama(tmp_path, num_hidden_layers=3, head_dim=96, tie_word_embeddings=True)
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.path == tmp_path
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 96)
    assert (config.hidden_size, config.vocab_size) == (128, 320)
    assert config.max_position_embeddings == config.max_model_len == 512
    assert config.dtype == "float32"
    assert config.tie_word_embeddings
    assert config.layer_windows == (0, 0, 0)
    assert config.sliding_windows == (0,)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.rope().theta == reference.config.rope_parameters["rope_theta"]


def test_reads_an_older_config() -> None:
    config = ModelConfig.from_dict(LLAMA_3_8B)
    assert config.head_dim == 128
    assert config.dtype == "bfloat16"
    assert config.rope().theta == 500000.0
    assert not config.tie_word_embeddings
    model = build_model(config, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248


def test_what_may_be_left_out() -> None:
    absent = (
        "num_key_value_heads",
        "rope_theta",
        "rms_norm_eps",
        "torch_dtype",
        "eos_token_id",
        "hidden_act",
    )
    config = ModelConfig.from_dict({key: value for key, value in LLAMA_3_8B.items() if key not in absent})
    assert config.num_kv_heads == 32
    assert config.rope().theta == 10000.0
    assert config.options["rms_norm_eps"] == 1e-6
    assert config.dtype is None
    assert config.eos_token_ids == ()
    assert ModelConfig.from_dict(LLAMA_3_8B | {"head_dim": None}).head_dim == 128


def test_eos_of_the_generation_config_wins() -> None:
    assert ModelConfig.from_dict(LLAMA_3_8B).eos_token_ids == (128001,)
    generation = {"eos_token_id": [128001, 128009], "temperature": 0.6}
    config = ModelConfig.from_dict(LLAMA_3_8B, generation)
    assert config.eos_token_ids == (128001, 128009)
    assert config.generation["temperature"] == 0.6
    assert ModelConfig.from_dict(LLAMA_3_8B, {"temperature": 1.0}).eos_token_ids == (128001,)
    for wrong in ("2", [2, "</s>"], True, 2.0):  # a text that no token ends would go on to max_tokens
        with pytest.raises(ValueError, match="eos_token_id must be a token id or a list of them"):
            ModelConfig.from_dict(LLAMA_3_8B, {"eos_token_id": wrong})


def test_stretched_rope_lengthens_the_context() -> None:
    config = ModelConfig.from_dict(LLAMA_3_8B | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert (config.max_position_embeddings, config.max_model_len) == (8192, 32768)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; .*LlamaForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_size": None}, "hidden_size .* must be an integer >= 1, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* got 0"),
        ({"vocab_size": "many"}, "vocab_size .* got 'many'"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 .* num_key_value_heads 5"),
        ({"hidden_size": 4095}, "hidden_size 4095 .* 32 attention heads"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' .* float32, float16, bfloat16"),
        ({"rope_scaling": {"type": "magic", "factor": 2.0}}, "unknown rope_type 'magic'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized .* 'awq'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(LLAMA_3_8B | change)


def test_folders_and_files_that_are_not_right(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"there is no config\.json in"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json must hold an object, got list"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    (tmp_path / "generation_config.json").write_text("nothing")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
