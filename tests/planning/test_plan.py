"""Plans: parameters counted as they are laid out, memory as the engine allocates it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagedinfer.cli.main import main
from pagedinfer.config import EngineConfig
from pagedinfer.errors import OutOfMemoryError
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from pagedinfer.planning.gpus import GIB, Gpu, find_gpu
from pagedinfer.planning.memory import graph_bytes, step_bytes
from pagedinfer.planning.parameters import count_parameters, rotary_table_bytes
from pagedinfer.planning.plan import Settings, make_plan
from pagedinfer.runner.memory import MIB
from pagedinfer.runner.worker import Worker
from tests.models.test_families import CASES

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_3_SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def config_of(case: str) -> ModelConfig:
    name, options = CASES[case]
    config = getattr(transformers, name)(**options)
    architecture = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    return ModelConfig.from_dict(
        json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    )


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_counted_as_they_are_laid_out(case: str) -> None:
    config = config_of(case)
    model = build_model(config, torch.float32, torch.device("meta"))
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert rotary_table_bytes(config, config.max_model_len) == pytest.approx(buffers, rel=0.05, abs=1024)


def test_parameters_of_models_that_everybody_knows() -> None:
    assert count_parameters(ModelConfig.from_dict(LLAMA_3_8B)).total == 8_030_261_248
    mixtral = LLAMA_3_8B | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }
    parameters = count_parameters(ModelConfig.from_dict(mixtral))
    assert parameters.total == 46_702_792_704
    assert parameters.expert_share == 0.25


@pytest.mark.parametrize("case", ["Qwen2, tied", "OPT", "Mixtral"])
def test_the_engine_allocates_what_was_planned(case: str, tmp_path: Path) -> None:
    """Weights with their tables, KV cache, and the tables of the running requests, within 5 %."""
    name, options = next(CASES[found] for found in CASES if found == case or found.startswith(case))
    config = getattr(transformers, name)(**options, architectures=[name.replace("Config", "ForCausalLM")])
    config.save_pretrained(tmp_path)
    limits: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_memory_bytes": 8 << 20, "dtype": "float32"}
    model_config = ModelConfig.from_pretrained(tmp_path)
    engine_config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", **limits)
    worker = Worker(engine_config, model_config)
    plan = make_plan(model_config, Gpu("any", 80 * GIB, None, None), Settings(**limits))
    tensors = [*worker._model.parameters(), *worker._model.buffers()]
    assert plan.weights == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.05)
    cache = worker._runner._cache.blocks
    assert (plan.num_blocks, plan.block_bytes) == (worker.num_blocks, worker.block_bytes)
    assert plan.kv_cache == cache.nbytes
    assert plan.max_model_len == worker.max_model_len
    worker.close()


@pytest.mark.parametrize(
    ("model", "seqs", "tokens", "length", "measured"),
    [
        (LLAMA_3_8B, 1024, 16384, 32768, 2270),
        (LLAMA_3_8B, 256, 16384, 768, 2052),
        (LLAMA_3_8B, 34, 16384, 16416, 1990),
        (LLAMA_3_8B, 64, 8192, 8192, 1046),
        (LLAMA_3_8B, 1024, 4096, 4096, 1557),
        (LLAMA_3_8B, 256, 4096, 2048, 634),
        (LLAMA_3_8B, 256, 2048, 768, 504),
        (LLAMA_3_8B, 34, 2048, 16416, 308),
        (QWEN_3_SMALL, 1024, 16384, 40960, 1746),
        (QWEN_3_SMALL, 256, 16384, 768, 592),
        (QWEN_3_SMALL, 1024, 4096, 4096, 1357),
        (QWEN_3_SMALL, 256, 4096, 32768, 488),
    ],
)
def test_the_largest_step_as_measured_on_an_h200(
    model: dict[str, Any], seqs: int, tokens: int, length: int, measured: int
) -> None:
    """MiB that engines with these limits have logged."""
    planned = step_bytes(ModelConfig.from_dict(model), 2, 1, seqs, tokens, length, 16)
    assert planned / MIB == pytest.approx(measured, rel=0.04)


def test_llama_3_8b_on_an_h200_as_measured() -> None:
    """The log of an engine with default limits and of what it then allocated, every part of it."""
    plan = make_plan(ModelConfig.from_dict(LLAMA_3_8B | {"max_position_embeddings": 32768}), find_gpu("H200"))
    assert plan.weights / MIB == pytest.approx(15_332.5, rel=0.001)
    assert plan.step / MIB == pytest.approx(2270, rel=0.02)
    assert plan.graphs / MIB == pytest.approx(450, rel=0.02)
    assert plan.outside / MIB == pytest.approx(234, rel=0.02)
    assert plan.margin / MIB == pytest.approx(823.5, rel=0.02)
    assert plan.kv_cache / MIB == pytest.approx(112_112, rel=0.001)


def test_qwen3_on_an_h200_as_measured() -> None:
    plan = make_plan(ModelConfig.from_dict(QWEN_3_SMALL), find_gpu("H200"))
    assert plan.weights / MIB == pytest.approx(1156.9, rel=0.001)
    assert plan.step / MIB == pytest.approx(1746, rel=0.02)
    assert plan.graphs / MIB == pytest.approx(290, rel=0.02)
    assert plan.kv_cache / MIB == pytest.approx(127_031, rel=0.001)


@pytest.mark.parametrize(
    ("model", "seqs", "tokens", "length", "measured"),
    [
        (LLAMA_3_8B, 1024, 16384, 32768, 450),
        (LLAMA_3_8B, 256, 4096, 2048, 421),
        (LLAMA_3_8B, 34, 2048, 16416, 370),
        (QWEN_3_SMALL, 1024, 16384, 40960, 290),
        (QWEN_3_SMALL, 256, 4096, 32768, 210),
    ],
)
def test_graphs_as_measured_on_an_h200(
    model: dict[str, Any], seqs: int, tokens: int, length: int, measured: int
) -> None:
    """MiB that all graphs of engines with these limits took, of torch's memory and of the driver's."""
    planned = graph_bytes(ModelConfig.from_dict(model), 2, 1, seqs, tokens, length, 16)
    assert planned / MIB == pytest.approx(measured, rel=0.02)


def test_what_an_h200_can_reach() -> None:
    """Decode rates of Llama 3 8B's shape are bounds that the engine comes near."""
    settings = Settings(max_num_seqs=256, max_model_len=2128)
    plan = make_plan(ModelConfig.from_dict(LLAMA_3_8B), find_gpu("H200"), settings)
    assert plan.requests_of(2128) == 256
    seconds = plan.decode_seconds(256, 512)
    assert seconds is not None
    assert seconds == pytest.approx(8.0e-3, rel=0.15)
    single = plan.decode_seconds(1, 128)
    assert single is not None
    assert 1 / single == pytest.approx(286, rel=0.1)


def test_a_share_of_several_gpus() -> None:
    config = ModelConfig.from_dict(LLAMA_3_8B)
    one = make_plan(config, find_gpu("24GiB"))
    two = make_plan(config, find_gpu("24GiB"), Settings(tensor_parallel_size=2))
    assert two.weights == pytest.approx(one.weights / 2, rel=0.01)
    assert two.block_bytes == one.block_bytes / 2
    assert two.num_kv_tokens > 4 * one.num_kv_tokens


def test_what_does_not_fit_says_what_would() -> None:
    config = ModelConfig.from_dict(LLAMA_3_8B)
    with pytest.raises(OutOfMemoryError, match="no room for a KV cache"):
        make_plan(config, find_gpu("12GiB"))
    with pytest.raises(OutOfMemoryError, match=r"The largest max_model_len that fits is \d+"):
        make_plan(config, find_gpu("19.5GiB"), Settings(max_model_len=8192, max_num_seqs=16))
    with pytest.raises(ValueError, match="dtype must be one of"):
        make_plan(config, find_gpu("24GiB"), Settings(dtype="int3"))


def test_what_an_engine_refuses_is_not_planned() -> None:
    config, gpu = ModelConfig.from_dict(LLAMA_3_8B), find_gpu("H200")
    with pytest.raises(ValueError, match=r"max_model_len must be at most 8192 tokens.*got 8193"):
        make_plan(config, gpu, Settings(max_model_len=8193))
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide this model"):
        make_plan(config, gpu, Settings(tensor_parallel_size=3))


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("h200", "H200", 139.8),
        ("A100 80GB", "A100-80GB", 79.1),
        ("24GiB", "24GiB", 24),
        ("24g", "24g", 22.35),
    ],
)
def test_gpus_by_name_and_by_size(text: str, name: str, gib: float) -> None:
    gpu = find_gpu(text)
    assert gpu.name == name
    assert gpu.memory / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("text", ["H20O", "24", "large", ""])
def test_other_gpus_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--gpu takes a size such as 24GiB or one of B200"):
        find_gpu(text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert main(["plan", str(tmp_path), "--gpu", "H100-80GB", "--lengths", "1k", "4000"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "weights",
        "KV cache",
        "requests of 1,000 tokens",
        "requests of 4,000 tokens",
        "tokens/s",
    ):
        assert expected in text
    assert main(["plan", str(tmp_path), "--gpu", "24GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"]["weights"] > 14 * GIB
    assert found["decode"] == []
    assert main(["plan", str(tmp_path), "--gpu", "8GiB"]) == 1
    assert "no room for a KV cache" in capsys.readouterr().err
