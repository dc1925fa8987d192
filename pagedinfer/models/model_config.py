"""What a checkpoint's config.json and generation_config.json say, in our words. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedinfer.config import DTYPES
from pagedinfer.layers.rope_config import RopeConfig
from pagedinfer.models.gguf_config import gguf_config, is_gguf
from pagedinfer.models.registry import Family, find_family


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model, as its layers, the runner and the scheduler need to know it."""

    path: Path
    """The checkpoint's folder, or its GGUF file."""
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding; the tokenizer may have fewer tokens."""
    max_position_embeddings: int
    """As config.json says."""
    max_model_len: int
    """The longest context that the model is meant for: max_position_embeddings, or more if its RoPE stretches
    that."""
    dtype: str | None
    """What the checkpoint was saved in: "float32", "float16" or "bfloat16"; None if it does not say."""
    tie_word_embeddings: bool
    layer_windows: tuple[int, ...]
    """For each layer, how many keys a query sees; 0: all."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Any of these ends a sequence."""
    generation: Mapping[str, Any]
    """generation_config.json, as it is; empty if there is none."""
    options: Mapping[str, Any]
    """config.json over the defaults of its family, for what only the family knows."""

    def check_max_model_len(self, max_model_len: int | None) -> None:
        """Raises ValueError if it is longer than the model's; None: the model's."""
        if max_model_len is not None and max_model_len > self.max_model_len:
            raise ValueError(
                f"max_model_len must be at most {self.max_model_len} tokens, which is what the model takes, "
                f"got {max_model_len}"
            )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Reads the configuration in a checkpoint's folder, or that in a GGUF file.

        Raises:
            ValueError: no such folder or file, an unknown architecture, or an option that is missing, of a
                wrong value, or not supported; the message names it.
        """
        path = Path(path)
        if is_gguf(path) and path.is_file():
            return cls.from_dict(gguf_config(path), path=path)
        if not path.is_dir():
            raise ValueError(f"there is no folder {str(path)!r} to load a model from")
        config = _read_json(path / "config.json")
        generation_path = path / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return cls.from_dict(config, generation, path=path)

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        *,
        path: str | Path = "",
    ) -> ModelConfig:
        """The same from the parsed files.

        Raises:
            ValueError: as `from_pretrained`.
        """
        generation = generation or {}
        architecture = _architecture(config)
        family = find_family(architecture)
        options = {**family.defaults, **config}
        if options.get("quantization_config"):
            method = options["quantization_config"].get("quant_method", "unknown")
            raise ValueError(
                f"quantized checkpoints are not supported; this one's quant_method is {method!r}"
            )

        hidden_size = _size(options, family, "hidden_size")
        num_heads = _size(options, family, "num_attention_heads")
        num_layers = _size(options, family, "num_hidden_layers")
        max_position = _size(options, family, "max_position_embeddings")
        if options.get("head_dim") is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of {num_heads} attention heads")
        head_dim = _size(options, family, "head_dim", hidden_size // num_heads)
        num_kv_heads = _size(options, family, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        max_model_len = max_position
        if family.has_rope:
            rope = _rope(options, head_dim, max_position, "full_attention")
            if not family.stretch_is_counted:
                max_model_len = rope.context_length
        eos = generation.get("eos_token_id")
        return cls(
            path=Path(path),
            architecture=architecture,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            vocab_size=_size(options, family, "vocab_size"),
            max_position_embeddings=max_position,
            max_model_len=max_model_len,
            dtype=_dtype(options),
            tie_word_embeddings=bool(options.get("tie_word_embeddings", False)),
            layer_windows=tuple(family.window(options, layer) for layer in range(num_layers)),
            bos_token_id=generation.get("bos_token_id", options.get("bos_token_id")),
            eos_token_ids=_eos_token_ids(options.get("eos_token_id") if eos is None else eos),
            generation=generation,
            options=options,
        )

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """The different windows that the layers have, each once: a step needs a plan for each."""
        return tuple(dict.fromkeys(self.layer_windows))

    def rope(self, layer_type: str = "full_attention") -> RopeConfig:
        """The rotary embedding of a type of layer; most models have one for all."""
        return _rope(self.options, self.head_dim, self.max_position_embeddings, layer_type)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path.name} in {str(path.parent)!r}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not names:
        raise ValueError("config.json names no architecture (its key is 'architectures')")
    return str(names[0])


def _size(options: Mapping[str, Any], family: Family, name: str, default: int | None = None) -> int:
    key = family.names.get(name, name)
    value = options.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} in config.json must be an integer >= 1, got {value!r}")
    return value


def _rope(options: Mapping[str, Any], head_dim: int, max_position: int, layer_type: str) -> RopeConfig:
    return RopeConfig.from_config(
        options, head_dim=head_dim, max_position=max_position, layer_type=layer_type
    )


def _dtype(options: Mapping[str, Any]) -> str | None:
    name = options.get("dtype") or options.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} in config.json is not supported; supported are {', '.join(DTYPES)}")
    return name


def _eos_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)
