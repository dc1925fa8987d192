from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.parity import check_parity
from tests.tiny_models import make_llama

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head, head_dim 80": {"num_key_value_heads": 4, "head_dim": 80},
    "multi-query, head_dim 96": {"num_key_value_heads": 1, "head_dim": 96},
    "nine heads on three": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim 128, theta": {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "llama3 scaling": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "epsilon": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = make_llama(tmp_path, **CONFIGS[name])
    check_parity(tmp_path, reference)


def test_unknown_activation_is_refused(tmp_path: Path) -> None:
    make_llama(tmp_path, hidden_act="tanh")
    with pytest.raises(ValueError, match="unknown gated activation 'tanh'; known are silu"):
        check_parity(tmp_path, None)  # type: ignore[arg-type]


def test_head_dim_without_a_kernel_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    make_llama(tmp_path, head_dim=48)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="head_dim 48 is not supported; supported are 64, 80"):
        check_parity(tmp_path, None)  # type: ignore[arg-type]
