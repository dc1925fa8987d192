"""Fills a model's weights from a checkpoint's files, or with random numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from pagedinfer.config import LOAD_FORMATS
from pagedinfer.errors import WeightsError
from pagedinfer.layers.embedding import VocabularyEmbedding
from pagedinfer.layers.stored_tensor import StoredTensor
from pagedinfer.logging import get_logger
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.checkpoint import CheckpointFile, find_files, shorten
from pagedinfer.models.upload import Uploader

logger = get_logger(__name__)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_weights(
    model: CausalLM, path: str | Path, load_format: str = "auto", *, seed: int = 0, use_tqdm: bool = True
) -> None:
    """Fills all weights of a model.

    Only the files that the index lists are read, or the single one where there is no index. Each tensor is
    copied straight to where it belongs, from the mapped file or read piece by piece, and converted to the
    model's dtype on the way; of a tensor that is divided among ranks, only this rank's part is read.

    Args:
        model: from `build_model`.
        path: the checkpoint's folder.
        load_format: "safetensors"; "pt", .bin files; "auto", .bin files only where there are no safetensors;
            or "dummy", small random weights made on the device, for benchmarks.
        seed: of the dummy weights.
        use_tqdm: show a progress bar.

    Raises:
        WeightsError: a file that is missing or damaged, or tensors that are missing, unexpected, or of
            another shape or dtype than the model's; names files and tensors.
        ValueError: an unknown load_format.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        _load_files(model, find_files(Path(path), load_format), use_tqdm)


def checkpoint_tensors(model: CausalLM) -> dict[str, StoredTensor]:
    """What the model takes from a checkpoint: by a tensor's name, where each part of it goes."""
    wanted: dict[str, StoredTensor] = {}
    for path, module in model.named_modules():
        if hasattr(module, "checkpoint_tensors"):
            wanted |= module.checkpoint_tensors(path)
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            wanted[name] = StoredTensor.whole(parameter)
    return {_checkpoint_name(model, name): stored for name, stored in wanted.items()}


def _checkpoint_name(model: CausalLM, name: str) -> str:
    for ours, theirs in model.checkpoint_names.items():
        name = name.replace(ours, theirs)
    return name


def _load_files(model: CausalLM, files: list[CheckpointFile], use_tqdm: bool) -> None:
    found = {name: file for file in files for name in file.names()}
    ours = _names_in_model(model, found)
    _untie_if_stored_differently(model, {ours[name]: (name, file) for name, file in found.items()})
    stored_tensors = checkpoint_tensors(model)
    _check_names(model, files[0].path.parent, stored_tensors, found, ours)
    narrowed = False
    device = model.lm_head.weight.device
    total = sum(piece.destination.nbytes for stored in stored_tensors.values() for piece in stored.pieces)
    with (
        tqdm(
            total=total,
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not use_tqdm,
        ) as bar,
        Uploader(device) as uploader,
    ):
        for file in files:
            wanted = [name for name in found if found[name] is file and ours[name] in stored_tensors]
            with file.open() as tensors:
                for name in wanted:
                    source, stored = tensors.get(name), stored_tensors[ours[name]]
                    _check(source, stored, name, file)
                    place = tensors.place(name, source)
                    for piece in stored.pieces:
                        narrowed |= (source.dtype, piece.destination.dtype) == (torch.bfloat16, torch.float16)
                        uploader.copy(source[piece.source], piece.destination, place)
                        bar.update(piece.destination.nbytes)
                uploader.finish()
    if narrowed:
        logger.warning(
            "the checkpoint is in bfloat16 and was asked for as float16, which has a smaller range: large "
            "values may become infinite"
        )


def _names_in_model(model: CausalLM, found: Mapping[str, CheckpointFile]) -> dict[str, str]:
    """What each tensor would be called had the checkpoint been saved with its head."""
    prefix = model.base_prefix
    if any(name.startswith(prefix) for name in found):
        return {name: name for name in found}
    return {name: name if name.startswith("lm_head.") else prefix + name for name in found}


def _check_names(
    model: CausalLM,
    folder: Path,
    wanted: Mapping[str, StoredTensor],
    found: Mapping[str, CheckpointFile],
    ours: Mapping[str, str],
) -> None:
    unused = [*model.ignored_tensors, *(["lm_head\\.weight"] if "lm_head.weight" not in wanted else [])]
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in unused))
    missing = sorted(set(wanted) - set(ours.values()))
    unexpected = sorted(
        f"{name} ({file.path.name})"
        for name, file in found.items()
        if ours[name] not in wanted and not ignored.fullmatch(ours[name])
    )
    problems = [
        f"{kind}: {shorten(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise WeightsError(
            f"the tensors in {str(folder)!r} are not those of {type(model).__name__}: {'; '.join(problems)}"
        )


def _check(source: Tensor, stored: StoredTensor, name: str, file: CheckpointFile) -> None:
    if source.dtype not in _DTYPES:
        raise WeightsError(
            f"{name} in {file.path} is {source.dtype}; supported are float32, float16, bfloat16"
        )
    if source.shape != stored.shape:
        raise WeightsError(
            f"{name} in {file.path} has shape {list(source.shape)}, the model's has {list(stored.shape)}"
        )


def _untie_if_stored_differently(model: CausalLM, found: Mapping[str, tuple[str, CheckpointFile]]) -> None:
    """Some checkpoints say that the head is tied and store one that is not the embedding: take theirs."""
    [path] = [path for path, module in model.named_modules() if isinstance(module, VocabularyEmbedding)]
    embedding = _checkpoint_name(model, f"{path}.weight")
    if not model.lm_head.tied or not {embedding, "lm_head.weight"} <= found.keys():
        return
    (ours, one), (theirs, other) = found[embedding], found["lm_head.weight"]
    with one.open() as tensors, other.open() as others:
        if not torch.equal(tensors.get(ours), others.get(theirs)):
            model.lm_head.untie()


def _fill_randomly(model: CausalLM, seed: int) -> None:
    """Matrices of small normal numbers; norms of one and biases of zero, so that activations stay finite.

    What every rank has all of is the same on each.
    """
    parameters = dict(model.named_parameters())
    weight = model.lm_head.weight
    group = model.lm_head.placement.group
    common = torch.Generator(weight.device).manual_seed(seed)
    own = torch.Generator(weight.device).manual_seed(seed + 1 + group.rank)
    divided = {
        id(parameter)
        for module in model.modules()
        if hasattr(module, "checkpoint_tensors")
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in parameters.items():
        if parameter.dim() > 1:
            is_own = group.size > 1 and id(parameter) in divided
            parameter.normal_(std=0.02, generator=own if is_own else common)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
