"""What the metadata of a GGUF file say, as the config.json that the same model would have. Torch-free.

The format is of the ggml project (docs/gguf.md there); the gguf package, an extra of this one, reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama with experts": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""The models whose tensors gguf_file knows how to read, by `general.architecture`."""

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Of the keys below the architecture's name, what config.json calls them."""


def is_gguf(path: str | Path) -> bool:
    """Whether a model is one GGUF file, and not a folder."""
    return str(path).endswith(".gguf")


def gguf_parts(path: Path) -> list[Path]:
    """All files of a model that may be split: of name-00001-of-00003.gguf the three."""
    match = _PART.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_gguf(path: Path) -> GGUFReader:
    """The file, mapped.

    Raises:
        ValueError: it is not a whole GGUF file, or the gguf package is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(
            f"{path} needs the gguf package to be read: pip install 'pagedinfer[gguf]'"
        ) from None
    try:
        return GGUFReader(path, "c")  # writable to numpy, which torch asks for, and never written
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from None


def gguf_config(path: Path) -> dict[str, Any]:
    """The config.json that a GGUF file stands for.

    Raises:
        ValueError: a damaged file, or an architecture or an option that is not supported, by its name.
    """
    reader = read_gguf(gguf_parts(path)[0])
    values = {name: field.contents() for name, field in reader.fields.items() if _is_short(name)}
    architecture = values.get("general.architecture")
    has_experts = bool(values.get(f"{architecture}.expert_count"))
    if architecture not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {architecture!r} of {path.name} is not supported; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in values.items()
        if name.startswith(f"{architecture}.")
    }
    config: dict[str, Any] = {theirs: own[name] for name, theirs in _KEYS.items() if name in own}
    kind = "llama with experts" if architecture == "llama" and has_experts else architecture
    config["architectures"] = [GGUF_ARCHITECTURES[kind]]
    if kind == "llama with experts":
        config["num_local_experts"] = own["expert_count"]
    if architecture in ("gemma2", "gemma3"):
        config["query_pre_attn_scalar"] = _gemma_scale(config)
    if architecture == "qwen3moe":
        config["norm_topk_prob"] = True  # as all of them have it; the format has no key for it
    shapes = {tensor.name: tensor for part in _readers(path, reader) for tensor in part.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{path} has no tensor token_embd.weight")
    config["vocab_size"] = int(shapes["token_embd.weight"].shape[1])
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["torch_dtype"] = _dtype(shapes["token_embd.weight"].tensor_type.name)
    config["rope_parameters"] = _rope(own, shapes)
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = values.get(f"tokenizer.ggml.{name}_token_id")
    return config


_GEMMA_27B = (46, 62)
"""Layers of the largest Gemma 2 and 3, whose scores alone are scaled by another number than head_dim."""


def _gemma_scale(config: dict[str, Any]) -> int:
    """The format has no key for it; llama.cpp tells the models apart by their layers, too."""
    if config["num_hidden_layers"] in _GEMMA_27B:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _readers(path: Path, first: GGUFReader) -> list[GGUFReader]:
    return [first, *(read_gguf(part) for part in gguf_parts(path)[1:])]


def _is_short(name: str) -> bool:
    """Not the vocabulary, whose many strings take seconds to read."""
    return not name.startswith("tokenizer.") or name.endswith("_token_id")


def _dtype(kind: str) -> str:
    """What the model computes in: the file's own precision, or bfloat16 where it is quantized."""
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def _rope(own: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)}
    kind = own.get("rope.scaling.type", "none")
    if kind == "linear" or (kind == "yarn" and "rope.scaling.original_context_length" in own):
        rope |= {"rope_type": kind, "factor": own["rope.scaling.factor"]}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    elif kind != "none":
        raise ValueError(f"rope.scaling.type {kind!r} of a GGUF file is not supported")
    if "rope_freqs.weight" in tensors:
        # Llama 3's stretch, worked out: a divisor for each pair. longrope is that, with both lists alike.
        factors = tensors["rope_freqs.weight"].data.tolist()
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        rope |= {"factor": 1.0, "attention_factor": 1.0}
    return rope
