"""What the files of a checkpoint are called. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHT_FILES: Mapping[str, tuple[str, str]] = {
    "safetensors": ("model.safetensors.index.json", "model.safetensors"),
    "pt": ("pytorch_model.bin.index.json", "pytorch_model.bin"),
}
"""For each format the index of several files, and the single one where there is no index."""


def formats_to_try(load_format: str) -> tuple[str, ...]:
    """The formats that a `load_format` may mean, the preferred first."""
    return tuple(WEIGHT_FILES) if load_format == "auto" else (load_format,)
