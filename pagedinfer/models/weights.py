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
    model's dtype on the way.

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


def checkpoint_tensors(model: CausalLM) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its name, and the view of the model's memory that it fills."""
    destinations: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if hasattr(module, "checkpoint_tensors"):
            destinations |= module.checkpoint_tensors(path)
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) not in seen:  # a tied weight has one name, that of the embedding
                seen.add(id(parameter))
                destinations[name] = parameter
    for ours, theirs in model.checkpoint_names.items():
        destinations = {name.replace(ours, theirs): view for name, view in destinations.items()}
    return destinations


def _load_files(model: CausalLM, files: list[CheckpointFile], use_tqdm: bool) -> None:
    found = {name: file for file in files for name in file.names()}
    ours = _names_in_model(model, found)
    _untie_if_stored_differently(model, {ours[name]: (name, file) for name, file in found.items()})
    destinations = checkpoint_tensors(model)
    _check_names(model, files[0].path.parent, destinations, found, ours)
    narrowed = False
    device = model.lm_head.weight.device
    total = sum(destination.nbytes for destination in destinations.values())
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
            wanted = [name for name in found if found[name] is file and ours[name] in destinations]
            with file.open() as tensors:
                for name in wanted:
                    source, destination = tensors.get(name), destinations[ours[name]]
                    _check(source, destination, name, file)
                    narrowed |= (source.dtype, destination.dtype) == (torch.bfloat16, torch.float16)
                    uploader.copy(source, destination, tensors.place(name, source))
                    bar.update(destination.nbytes)
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
    destinations: Mapping[str, Tensor],
    found: Mapping[str, CheckpointFile],
    ours: Mapping[str, str],
) -> None:
    unused = [*model.ignored_tensors, *(["lm_head\\.weight"] if "lm_head.weight" not in destinations else [])]
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in unused))
    missing = sorted(set(destinations) - set(ours.values()))
    unexpected = sorted(
        f"{name} ({file.path.name})"
        for name, file in found.items()
        if ours[name] not in destinations and not ignored.fullmatch(ours[name])
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


def _check(source: Tensor, destination: Tensor, name: str, file: CheckpointFile) -> None:
    if source.dtype not in _DTYPES:
        raise WeightsError(
            f"{name} in {file.path} is {source.dtype}; supported are float32, float16, bfloat16"
        )
    if source.shape != destination.shape:
        raise WeightsError(
            f"{name} in {file.path} has shape {list(source.shape)}, the model's has {list(destination.shape)}"
        )


def _untie_if_stored_differently(model: CausalLM, found: Mapping[str, tuple[str, CheckpointFile]]) -> None:
    """Some checkpoints say that the head is tied and store one that is not the embedding: take theirs."""
    embedding = next(
        (name for name, weight in checkpoint_tensors(model).items() if weight is model.lm_head.weight), None
    )
    if embedding in (None, "lm_head.weight") or not {embedding, "lm_head.weight"} <= found.keys():
        return
    assert embedding is not None
    (ours, one), (theirs, other) = found[embedding], found["lm_head.weight"]
    with one.open() as tensors, other.open() as others:
        if not torch.equal(tensors.get(ours), others.get(theirs)):
            model.lm_head.untie()


def _fill_randomly(model: CausalLM, seed: int) -> None:
    """Matrices of small normal numbers; norms of one and biases of zero, so that activations stay finite."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in parameters.items():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
