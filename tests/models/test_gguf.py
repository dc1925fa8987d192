"""GGUF files: transformers reads the same file as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedinfer import LLM, SamplingParams
from pagedinfer.errors import WeightsError
from pagedinfer.models.checkpoint import find_files
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from pagedinfer.models.weights import load_weights
from tests.models.families import FULL_AND_SLIDING, ROTARY, make
from tests.models.gguf_files import Q, write_gguf
from tests.models.harness import load
from tests.models.parity import random_prompts, transformers_logits

# Six layers, of which Gemma 3's last has no window; a scale that is head_dim, as files take for granted.
GEMMA = {"num_hidden_layers": 6, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
GEMMA2 = GEMMA | {"num_hidden_layers": 2, "sliding_window": 9, "attn_logit_softcapping": 2.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", GEMMA2),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"sliding_window": 9, "rope_parameters": FULL_AND_SLIDING}),
    "qwen2": ("Qwen2Config", {"hidden_size": 256}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def write(tmp_path: Path, name: str, kind: Q = Q.F32, **options: Any) -> tuple[Path, PreTrainedModel]:
    config_class, config = FAMILIES[name]
    model = make(tmp_path / "model", config_class, ROTARY | config)
    file = tmp_path / "model.gguf"
    write_gguf(file, model, kind, **options)
    return file, model


def check(file: Path, reference: PreTrainedModel, tolerance: float = 1e-4) -> None:
    [prompt] = random_prompts((20,))
    [logits] = load(file).logits([prompt], chunk=7)
    torch.testing.assert_close(logits, transformers_logits(reference, prompt), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_is_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    check(*write(tmp_path, name))


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q5_1])
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma2"])
def test_equals_transformers_of_the_same_file(name: str, kind: Q, tmp_path: Path) -> None:
    file, _ = write(tmp_path, name, kind)
    quantization = getattr(transformers, "GgufConfig", None)
    options = {} if quantization is None else {"quantization_config": quantization(dequantize=True)}
    config_class, config = FAMILIES[name]
    reference = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=getattr(transformers, config_class)(**ROTARY | config),  # its own reading has gaps
        dtype=torch.float32,
        attn_implementation="eager",
        **options,
    )
    check(file, reference.eval())


def test_factors_of_the_frequencies(tmp_path: Path) -> None:
    """As the files of Llama 3.1 have them: its stretch, worked out."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    stretched = make(tmp_path / "model", "LlamaConfig", ROTARY | {"rope_parameters": rope})
    plain = 1.0 / 1e4 ** (torch.arange(0, 64, 2) / 64)
    file = tmp_path / "model.gguf"
    write_gguf(file, stretched, rope_factors=plain / stretched.model.rotary_emb.inv_freq)
    check(file, stretched)


def test_linear_stretch_and_a_window(tmp_path: Path) -> None:
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    file, _ = write(tmp_path, "llama", changes=changes)
    config = ModelConfig.from_pretrained(file)
    assert (config.rope().rope_type, config.rope().factor) == ("linear", 2.0)
    with pytest.raises(ValueError, match=r"rope\.scaling\.type 'magic' of a GGUF file is not supported"):
        ModelConfig.from_pretrained(write(tmp_path, "llama", changes={"llama.rope.scaling.type": "magic"})[0])


def test_split_files_are_read_together(tmp_path: Path) -> None:
    _, model = write(tmp_path, "llama", split=5)
    first = sorted(tmp_path.glob("model-00001-of-*.gguf"))[0]
    assert len(find_files(first)) > 3
    check(first, model)
    last = find_files(first)[-1].path
    last.rename(tmp_path / "elsewhere")
    with pytest.raises((WeightsError, ValueError), match=last.name):
        load(first)


@pytest.mark.parametrize("kept", [0, 4, 100, -40])
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    file, _ = write(tmp_path, "llama")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises((WeightsError, ValueError), match=rf"{file} is not a whole GGUF file"):
        load(file)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    file, _ = write(tmp_path, "llama")
    file.write_bytes(file.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ValueError, match=r"GGUF architecture 'mamba' .* supported are llama, .*qwen2"):
        load(file)


def test_tensor_that_is_missing_or_unexpected_is_named(tmp_path: Path) -> None:
    file, _ = write(tmp_path, "llama")
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_op.weight"))
    message = r"missing: model\.layers\.1\.mlp\.up_proj\.weight; unexpected: model\.layers\.1\.ffn_op\.weight"
    with pytest.raises(WeightsError, match=message):
        load(file)


def test_load_format_must_fit(tmp_path: Path) -> None:
    file, _ = write(tmp_path, "llama")
    model = build_model(ModelConfig.from_pretrained(file), torch.float32, torch.device("meta"))
    with pytest.raises(WeightsError, match=r"is a GGUF file, and load_format='pt'"):
        load_weights(model, file, "pt")
    with pytest.raises(WeightsError, match=r'load_format="gguf" needs the path of a \.gguf file'):
        load_weights(model, tmp_path, "gguf")


def test_an_engine_on_a_file(tmp_path: Path) -> None:
    file, _ = write(tmp_path, "llama")
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    found = []
    for model in (file, tmp_path / "model"):
        with LLM(str(model), skip_tokenizer_init=True, device="cpu", num_gpu_blocks_override=64) as llm:
            [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy, use_tqdm=False)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]
