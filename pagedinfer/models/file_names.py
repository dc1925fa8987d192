"""What the files of a checkpoint are called, and which of them hold its weights. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

WEIGHT_FILES: Mapping[str, tuple[str, str]] = {
    "safetensors": ("model.safetensors.index.json", "model.safetensors"),
    "pt": ("pytorch_model.bin.index.json", "pytorch_model.bin"),
}
"""For each format the index of several files, and the single one where there is no index."""


class WeightFile(NamedTuple):
    """The file to begin with when weights are read."""

    name: str
    kind: str
    """Of WEIGHT_FILES."""
    is_index: bool


def weight_file(load_format: str, exists: Callable[[str], bool], where: str) -> WeightFile:
    """The index of a checkpoint, or its single file, of the preferred format that there is.

    Args:
        load_format: "auto", or one of WEIGHT_FILES.
        exists: whether there is a file of that name.
        where: the checkpoint, for the message.

    Raises:
        ValueError: there is neither; the message names what was looked for.
    """
    formats = tuple(WEIGHT_FILES) if load_format == "auto" else (load_format,)
    for each in formats:
        index, single = WEIGHT_FILES[each]
        if exists(index):
            return WeightFile(index, each, is_index=True)
        if exists(single):
            return WeightFile(single, each, is_index=False)
    wanted = " nor ".join(name for each in formats for name in WEIGHT_FILES[each])
    raise ValueError(f"there is neither {wanted} in {where} (load_format={load_format!r})")


def read_index(index: Path) -> dict[str, set[str]]:
    """The files that an index lists, and of each the tensors that are taken from it.

    Raises:
        ValueError: it is no index.
    """
    files: dict[str, set[str]] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for tensor, file in weight_map.items():
            if not isinstance(file, str):
                raise TypeError(f"{tensor} is in {file!r}")
            files.setdefault(file, set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of a checkpoint's files: {error!r}") from None
    return files
