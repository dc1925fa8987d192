"""Fills a model's weights from a checkpoint's safetensors files, or with random numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from pagedinfer.errors import WeightsError
from pagedinfer.logging import get_logger
from pagedinfer.models.causal_lm import CausalLM

logger = get_logger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_weights(
    model: CausalLM, path: str | Path, load_format: str = "auto", *, seed: int = 0, use_tqdm: bool = True
) -> None:
    """Fills all weights of a model.

    Only the files that the index lists are read, or model.safetensors where there is no index. Each tensor
    is mapped and copied straight to where it belongs, and converted to the model's dtype on the way.

    Args:
        model: from `build_model`.
        path: the checkpoint's folder.
        load_format: "auto" and "safetensors" read the folder; "dummy" makes small random weights on the
            device, for benchmarks.
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
        _load_safetensors(model, _find_files(Path(path)), use_tqdm)


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


def _find_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the names to take from it; None: all that it holds."""
    index = folder / _INDEX
    if not index.exists():
        single = folder / _SINGLE
        if not single.exists():
            raise WeightsError(f"there is neither {_INDEX} nor {_SINGLE} in {str(folder)!r}")
        return {single: None}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for tensor, file in weight_map.items():
            if Path(file).name != file:
                raise WeightsError(f"{index} lists {file!r}, which is not the name of a file beside it")
            names = files.setdefault(folder / file, set())
            assert names is not None
            names.add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors files: {error!r}") from None
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise WeightsError(f"{index} lists files that are not there: {', '.join(sorted(missing))}")
    return files


def _load_safetensors(model: CausalLM, files: Mapping[Path, set[str] | None], use_tqdm: bool) -> None:
    found = _names(files)
    ours = _names_in_model(model, found)
    _untie_if_stored_differently(model, {ours[name]: (name, file) for name, file in found.items()})
    destinations = checkpoint_tensors(model)
    _check_names(model, destinations, found, ours)
    narrowed = False
    with tqdm(total=len(destinations), desc="Loading weights", unit="tensor", disable=not use_tqdm) as bar:
        for file in files:
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if found.get(name) == file and ours[name] in destinations:
                        source, destination = tensors.get_tensor(name), destinations[ours[name]]
                        _copy(source, destination, name, file)
                        narrowed |= (source.dtype, destination.dtype) == (torch.bfloat16, torch.float16)
                        bar.update()
    if narrowed:
        logger.warning(
            "the checkpoint is in bfloat16 and was asked for as float16, which has a smaller range: large "
            "values may become infinite"
        )


def _names_in_model(model: CausalLM, found: Mapping[str, Path]) -> dict[str, str]:
    """What each tensor would be called had the checkpoint been saved with its head."""
    prefix = model.base_prefix
    if any(name.startswith(prefix) for name in found):
        return {name: name for name in found}
    return {name: name if name.startswith("lm_head.") else prefix + name for name in found}


def _check_names(
    model: CausalLM, destinations: Mapping[str, Tensor], found: Mapping[str, Path], ours: Mapping[str, str]
) -> None:
    unused = [*model.ignored_tensors, *(["lm_head\\.weight"] if "lm_head.weight" not in destinations else [])]
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in unused))
    missing = sorted(set(destinations) - set(ours.values()))
    unexpected = sorted(
        f"{name} ({file.name})"
        for name, file in found.items()
        if ours[name] not in destinations and not ignored.fullmatch(ours[name])
    )
    problems = [
        f"{kind}: {_listed(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        folder = next(iter(found.values())).parent
        raise WeightsError(
            f"the tensors in {str(folder)!r} are not those of {type(model).__name__}: {'; '.join(problems)}"
        )


def _names(files: Mapping[Path, set[str] | None]) -> dict[str, Path]:
    """Which file holds each tensor."""
    found: dict[str, Path] = {}
    for file, listed in files.items():
        with _open(file) as tensors:
            names = set(tensors.keys())
        absent = sorted((listed or set()) - names)
        if absent:
            raise WeightsError(f"{file} lacks tensors that the index lists for it: {_listed(absent)}")
        found |= dict.fromkeys(names if listed is None else listed, file)
    return found


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is not a whole safetensors file: {error}") from None


def _copy(source: Tensor, destination: Tensor, name: str, file: Path) -> None:
    if source.dtype not in _DTYPES:
        raise WeightsError(f"{name} in {file} is {source.dtype}; supported are float32, float16, bfloat16")
    if source.shape != destination.shape:
        raise WeightsError(
            f"{name} in {file} has shape {list(source.shape)}, the model's has {list(destination.shape)}"
        )
    destination.copy_(source)


def _untie_if_stored_differently(model: CausalLM, found: Mapping[str, tuple[str, Path]]) -> None:
    """Some checkpoints say that the head is tied and store one that is not the embedding: take theirs."""
    embedding = next(
        (name for name, weight in checkpoint_tensors(model).items() if weight is model.lm_head.weight), None
    )
    if embedding in (None, "lm_head.weight") or not {embedding, "lm_head.weight"} <= found.keys():
        return
    stored = []
    for name in (embedding, "lm_head.weight"):
        assert name is not None
        original, file = found[name]
        with _open(file) as tensors:
            stored.append(tensors.get_tensor(original))
    if not torch.equal(*stored):
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


def _listed(names: list[str], at_most: int = 10) -> str:
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"
