"""The loader against what checkpoints in the wild hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedinfer.errors import WeightsError
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from pagedinfer.models.weights import load_weights
from tests.models.harness import load
from tests.models.parity import TOLERANCE, random_prompts, transformers_logits
from tests.tiny_models import make_llama

INDEX = "model.safetensors.index.json"


def check(path: Path, reference: PreTrainedModel) -> None:
    [prompt] = random_prompts((20,))
    [logits] = load(path).logits([prompt])
    torch.testing.assert_close(logits, transformers_logits(reference, prompt), rtol=0, atol=TOLERANCE)


def index_of(path: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return weight_map


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change_tensor(path: Path, name: str, tensor: torch.Tensor | None, new_name: str | None = None) -> None:
    """Replaces a tensor in its shard, drops it (None), or renames it; the index follows."""
    weight_map = index_of(path)
    file = path / weight_map.pop(name)
    tensors = load_file(file)
    old = tensors.pop(name)
    if new_name is not None or tensor is not None:
        tensors[new_name or name] = old if tensor is None else tensor
        weight_map[new_name or name] = file.name
    save_file(tensors, file)
    write_index(path, weight_map)


def test_is_sharded_and_loads_in_any_order(tmp_path: Path) -> None:
    reference = make_llama(tmp_path)
    weight_map = index_of(tmp_path)
    assert len(set(weight_map.values())) > 3
    write_index(tmp_path, dict(reversed(weight_map.items())))
    check(tmp_path, reference)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    reference = make_llama(tmp_path, shard_size="1GB")
    assert not (tmp_path / INDEX).exists()
    check(tmp_path, reference)


# vllm PR#6758, vllm#5621, sglang PR#16235
def test_tied_checkpoint_without_a_head(tmp_path: Path) -> None:
    reference = make_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in index_of(tmp_path)
    model = load(tmp_path)
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    check(tmp_path, reference)


@pytest.mark.parametrize("same", [True, False])
def test_tied_checkpoint_that_also_stores_a_head(tmp_path: Path, same: bool) -> None:
    reference = make_llama(tmp_path, tie_word_embeddings=True)
    embedding = reference.get_input_embeddings().weight.detach().clone()
    head = embedding if same else embedding.flip(0).contiguous()
    save_file({"lm_head.weight": head}, tmp_path / "head.safetensors")
    write_index(tmp_path, index_of(tmp_path) | {"lm_head.weight": "head.safetensors"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    check(tmp_path, again)
    model = load(tmp_path).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is same


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    make_llama(tmp_path)
    change_tensor(tmp_path, "model.layers.1.self_attn.k_proj.weight", None)
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(tmp_path)


def test_untied_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    make_llama(tmp_path)
    change_tensor(tmp_path, "lm_head.weight", None)
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        load(tmp_path)


def test_unexpected_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    make_llama(tmp_path)
    save_file({"model.layers.0.extra.weight": torch.ones(2)}, tmp_path / "extra.safetensors")
    write_index(tmp_path, index_of(tmp_path) | {"model.layers.0.extra.weight": "extra.safetensors"})
    message = r"unexpected: model\.layers\.0\.extra\.weight \(extra\.safetensors\)"
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def test_renamed_tensor_is_missing_and_unexpected(tmp_path: Path) -> None:
    make_llama(tmp_path)
    change_tensor(tmp_path, "model.norm.weight", None, "model.final_norm.weight")
    message = r"missing: model\.norm\.weight; unexpected: model\.final_norm\.weight"
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def test_many_missing_tensors_are_cut_short(tmp_path: Path) -> None:
    make_llama(tmp_path, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.3\..* and 8 more$"):
        load(tmp_path)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    reference = make_llama(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: torch.ones(32)}, tmp_path / "rotary.safetensors")
    write_index(tmp_path, index_of(tmp_path) | {name: "rotary.safetensors"})
    check(tmp_path, reference)


# vllm#40765, mlx-vlm PR#1464
def test_stray_files_are_not_read(tmp_path: Path) -> None:
    reference = make_llama(tmp_path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in reference.state_dict().items()}
    save_file(zeros, tmp_path / "consolidated.safetensors")
    save_file(zeros, tmp_path / "model.safetensors")
    torch.save(zeros, tmp_path / "pytorch_model.bin")
    check(tmp_path, reference)


def test_tensor_is_taken_from_the_listed_file(tmp_path: Path) -> None:
    reference = make_llama(tmp_path)
    weight_map = index_of(tmp_path)
    other = next(file for file in weight_map.values() if file != weight_map["model.norm.weight"])
    save_file(load_file(tmp_path / other) | {"model.norm.weight": torch.zeros(128)}, tmp_path / other)
    check(tmp_path, reference)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_llama(tmp_path)
    shard = index_of(tmp_path)["model.norm.weight"]
    (tmp_path / shard).unlink()
    with pytest.raises(WeightsError, match=f"not there: {re.escape(shard)}"):
        load(tmp_path)


def test_index_that_promises_more_than_its_files_hold(tmp_path: Path) -> None:
    make_llama(tmp_path)
    weight_map = index_of(tmp_path)
    change_tensor(tmp_path, "model.norm.weight", None)
    write_index(tmp_path, weight_map)
    with pytest.raises(
        WeightsError, match=rf"{weight_map['model.norm.weight']} lacks .*: model\.norm\.weight"
    ):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -8])
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    make_llama(tmp_path)
    shard = tmp_path / index_of(tmp_path)["model.embed_tokens.weight"]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=f"{re.escape(str(shard))} is not a whole safetensors file"):
        load(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    make_llama(tmp_path)
    for file in [*tmp_path.glob("*.safetensors"), tmp_path / INDEX]:
        file.unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    make_llama(tmp_path)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(WeightsError, match=INDEX):
        load(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_index_cannot_leave_the_folder(tmp_path: Path, file: str) -> None:
    make_llama(tmp_path)
    write_index(tmp_path, index_of(tmp_path) | {"model.norm.weight": file})
    with pytest.raises(WeightsError, match="not the name of a file beside it"):
        load(tmp_path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    make_llama(tmp_path)
    change_tensor(tmp_path, "model.layers.0.mlp.up_proj.weight", torch.zeros(192, 127))
    message = r"model\.layers\.0\.mlp\.up_proj\.weight in .* shape \[192, 127\], .* \[192, 128\]"
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def test_integers_are_refused(tmp_path: Path) -> None:
    make_llama(tmp_path)
    change_tensor(tmp_path, "model.norm.weight", torch.ones(128, dtype=torch.int8))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight in .* is torch\.int8"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_other_precisions_are_converted(tmp_path: Path, stored: torch.dtype) -> None:
    reference = make_llama(tmp_path, shard_size="1GB")
    reference.to(stored).save_pretrained(tmp_path)
    check(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    assert ModelConfig.from_pretrained(tmp_path).dtype == str(stored).removeprefix("torch.")


@pytest.mark.parametrize(("stored", "warns"), [(torch.bfloat16, True), (torch.float32, False)])
def test_bfloat16_as_float16_warns(
    tmp_path: Path, stored: torch.dtype, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make_llama(tmp_path, shard_size="1GB").to(stored).save_pretrained(tmp_path)
    load(tmp_path, dtype=torch.float16)
    assert ("in bfloat16 and was asked for as float16" in caplog.text) is warns


def test_checkpoint_saved_without_its_head(tmp_path: Path) -> None:
    reference = make_llama(tmp_path, shard_size="1GB", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    check(tmp_path, reference)


def test_dummy_weights_are_seeded_and_finite(tmp_path: Path) -> None:
    make_llama(tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)

    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = build_model(config, torch.float32, torch.device("cpu"))
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        load_weights(model, "there is no such folder", "dummy", seed=seed)
        return dict(model.named_parameters())

    first, same, other = weights(0), weights(0), weights(1)
    assert all(torch.isfinite(tensor).all() and tensor.abs().sum() for tensor in first.values())
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_unknown_load_format(tmp_path: Path) -> None:
    make_llama(tmp_path)
    model = build_model(ModelConfig.from_pretrained(tmp_path), torch.float32, torch.device("meta"))
    with pytest.raises(ValueError, match="must be one of auto, safetensors, pt, gguf, dummy, got 'npcache'"):
        load_weights(model, tmp_path, "npcache")
