"""Sampling parameters that a model brings along, for requests that come without any. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedinfer.logging import get_logger
from pagedinfer.sampling_params import SamplingParams

logger = get_logger(__name__)

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What generation_config.json calls them, and what we do."""


def default_sampling_params(source: str, of_model: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request that brings none; a difference from our own defaults is logged.

    Args:
        source: "auto", the model's generation_config.json; "vllm", none; or a folder with such a file.
        of_model: the contents of the model's.

    Raises:
        ValueError: a folder without the file, or a value in it that is out of range.
    """
    if source == "vllm":
        return SamplingParams()
    config = of_model if source == "auto" else _read(Path(source))
    values = {ours: config[theirs] for theirs, ours in _FIELDS.items() if config.get(theirs) is not None}
    try:
        params = SamplingParams(**values)
    except ValueError as error:
        raise ValueError(
            f'generation_config.json: {error}; generation_config="vllm" goes without that file'
        ) from None
    plain = SamplingParams()
    changes = [f"{name}={value}" for name, value in values.items() if value != getattr(plain, name)]
    if changes:
        logger.info(
            "defaults of sampling from generation_config.json: %s; parameters that a request brings win, and "
            'generation_config="vllm" ignores the file',
            ", ".join(changes),
        )
    return params


def _read(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f'generation_config must be "auto", "vllm" or a folder with a generation_config.json, got '
            f"{str(folder)!r}: {error}"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, got {type(config).__name__}")
    return config
