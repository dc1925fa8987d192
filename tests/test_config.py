"""EngineConfig: what it takes and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pagedinfer import vllm_names
from pagedinfer.config import EngineConfig, unknown_option_message
from pagedinfer.sampling_params import SamplingParams


def test_defaults_are_valid() -> None:
    config = EngineConfig(model="m")
    assert config.block_size == 16
    assert config.gpu_memory_utilization == 0.92


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 3),
        ("tokenizer", ""),
        ("skip_tokenizer_init", 1),
        ("dtype", "int8"),
        ("dtype", 16),
        ("dtype", ["float32"]),
        ("load_format", "pickle"),
        ("device", "tpu"),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", True),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", "half"),
        ("kv_cache_memory_bytes", 0),
        ("kv_cache_memory_bytes", 1.5),
        ("kv_cache_memory_bytes", 10**400),
        ("num_gpu_blocks_override", 0),
        ("num_gpu_blocks_override", 10**400),
        ("block_size", 12),
        ("block_size", 1),
        ("block_size", 16.0),
        ("max_model_len", 0),
        ("max_model_len", 1),  # a prompt of a token would have no output
        ("max_num_seqs", -3),
        ("max_num_seqs", 10**12),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 10**12),
        ("enable_chunked_prefill", 0),
        ("watermark", -0.1),
        ("watermark", 1.0),
        ("long_prefill_token_threshold", -1),
        ("scheduling_policy", "lifo"),
        ("preemption_mode", "abort"),
        ("enforce_eager", 1),
        ("swap_space", -1.0),
        ("swap_space", float("inf")),
        ("swap_space", 1e300),
        ("swap_space", 10**400),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(name: str, value: Any) -> None:
    options = {"model": "m"} | {name: value}
    with pytest.raises(ValueError, match=f"^{name} must be") as error:
        EngineConfig(**options)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("auto", "auto")])
def test_dtype_names(given: str, meant: str) -> None:
    assert EngineConfig(model="m", dtype=given).dtype == meant


def test_an_unknown_option_gets_a_suggestion() -> None:
    assert "did you mean 'max_num_seqs'?" in unknown_option_message("LLM", "max_seqs")


@pytest.mark.parametrize(
    "name",
    [
        "speculative_config",
        "pipeline_parallel_size",
        "quantization",
        "enable_lora",
        "trust_remote_code",
        "kv_cache_dtype",
    ],
)
def test_what_vllm_has_says_what_to_do_without(name: str) -> None:
    message = unknown_option_message("LLM", name)
    assert message.startswith(f"LLM has no parameter {name!r}; vLLM has it, pagedinfer does not (yet): ")


def test_no_name_of_ours_is_said_to_be_vllms_alone() -> None:
    ours = {field.name for kind in (EngineConfig, SamplingParams) for field in dataclasses.fields(kind)}
    assert not ours & (vllm_names._ABSENT.keys() | vllm_names._INSTEAD.keys())
    assert unknown_option_message("LLM", "zzz") == "LLM has no parameter 'zzz'"
