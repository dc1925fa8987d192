"""Checkpoints in .bin files: read without running anything, and refused by name where that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedinfer.errors import WeightsError
from pagedinfer.models.checkpoint import find_files
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from pagedinfer.models.weights import load_weights
from tests.models.harness import load
from tests.models.test_weights import check
from tests.tiny_models import make_llama

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def state_dict(path: Path, **config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose safetensors are gone, and what they held."""
    reference = make_llama(path, shard_size="1GB", **config)
    (path / "model.safetensors").unlink()
    return reference, dict(reference.state_dict())


@pytest.mark.parametrize("zipped", [True, False])
def test_single_file(zipped: bool, tmp_path: Path) -> None:
    reference, tensors = state_dict(tmp_path)
    torch.save(tensors, tmp_path / SINGLE, _use_new_zipfile_serialization=zipped)
    check(tmp_path, reference)


def test_tied_checkpoint_that_stores_both_names(tmp_path: Path) -> None:
    reference, tensors = state_dict(tmp_path, tie_word_embeddings=True)
    assert tensors["lm_head.weight"].data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()
    torch.save(tensors, tmp_path / SINGLE)
    check(tmp_path, reference)


def test_shards_by_index_and_no_other_file(tmp_path: Path) -> None:
    reference, tensors = state_dict(tmp_path)
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"pytorch_model-{i % 3}.bin"
        tensors[name] = tensor.clone()
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name, at in weight_map.items() if at == file}, tmp_path / file)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    check(tmp_path, reference)
    (tmp_path / "pytorch_model-1.bin").unlink()
    with pytest.raises(WeightsError, match=r"not there: pytorch_model-1\.bin"):
        load(tmp_path)


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    reference = make_llama(tmp_path)
    torch.save({}, tmp_path / SINGLE)
    check(tmp_path, reference)
    [file] = find_files(tmp_path, "pt")
    assert file.path.name == SINGLE
    model = build_model(ModelConfig.from_pretrained(tmp_path), torch.float32, torch.device("cpu"))
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        load_weights(model, tmp_path, "pt", use_tqdm=False)


class Mischief:
    """Unpickled by a careless reader, it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


# CVE-2025-24357, CVE-2025-32434
@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_file_is_run(zipped: bool, tmp_path: Path) -> None:
    _, tensors = state_dict(tmp_path)
    torch.save(
        tensors | {"model.norm.weight": Mischief(tmp_path / "mischief")},
        tmp_path / SINGLE,
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(WeightsError, match=rf"{SINGLE} holds more than tensors, .* it is refused"):
        load(tmp_path)
    assert not (tmp_path / "mischief").exists()
    torch.load(tmp_path / SINGLE, weights_only=False)
    assert (tmp_path / "mischief").exists(), "the file would have done no harm anyway"


@pytest.mark.parametrize("kept", [0, 4, 5000, -8])
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    _, tensors = state_dict(tmp_path)
    file = tmp_path / SINGLE
    torch.save(tensors, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=f"{file} is not a whole file of torch.save"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 5000, -8])
def test_truncated_file_of_old_is_named(tmp_path: Path, kept: int) -> None:
    _, tensors = state_dict(tmp_path)
    file = tmp_path / SINGLE
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=f"{file} is not a whole file of torch.save"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "must hold a dict of tensors, got list"),
        ({0: torch.ones(2)}, "must hold a dict of tensors"),
        ({"model.norm.weight": {"a": 1}}, r"model\.norm\.weight in .* must be a dense tensor, got dict"),
        ({"a": torch.eye(2).to_sparse()}, r"a in .* must be a dense tensor, got torch\.sparse_coo"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    state_dict(tmp_path)
    torch.save(content, tmp_path / SINGLE)
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    _, tensors = state_dict(tmp_path)
    torch.save(tensors | {"model.norm.weight": torch.ones(127)}, tmp_path / SINGLE)
    with pytest.raises(WeightsError, match=rf"model\.norm\.weight in .*{SINGLE} has shape \[127\]"):
        load(tmp_path)
