"""Writes models as GGUF files, as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

Q = gguf.GGMLQuantizationType
_PLAIN = {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}
_ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    kind: Q = Q.F32,
    *,
    tokenizer: Path | None = None,
    rope_factors: Tensor | None = None,
    changes: dict[str, Any] | None = None,
    split: int = 0,
) -> None:
    """Writes `model` with its matrices as `kind` and all else in float32.

    Args:
        tokenizer: the folder of a byte-level BPE tokenizer to write too.
        rope_factors: divisors of the frequencies, float32 [head_dim / 2].
        changes: metadata instead of the model's; None leaves a key out.
        split: tensors a file, if it is to be several.
    """
    config = model.config
    name = gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(file, name, split_max_tensors=split)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata: dict[str, Any] = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": head_dim,
        f"{name}.rope.dimension_count": head_dim,
        f"{name}.vocab_size": config.vocab_size,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": float(_rope(config)["rope_theta"]),
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }
    if hasattr(config, "num_experts_per_tok"):
        metadata[f"{name}.expert_count"] = getattr(config, "num_experts", None) or config.num_local_experts
        metadata[f"{name}.expert_used_count"] = config.num_experts_per_tok
        if hasattr(config, "moe_intermediate_size"):
            metadata[f"{name}.expert_feed_forward_length"] = config.moe_intermediate_size
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            metadata[f"{name}.{key}"] = float(getattr(config, key))
    if "gemma" in name:
        metadata[f"{name}.attention.sliding_window"] = config.sliding_window
    if _rope(config)["rope_type"] == "linear":
        metadata[f"{name}.rope.scaling.type"] = "linear"
        metadata[f"{name}.rope.scaling.factor"] = float(_rope(config)["factor"])
    for key, value in (metadata | (changes or {})).items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer)
    for tensor_name, tensor in _tensors(model, head_dim).items():
        _add(writer, tensor_name, tensor, kind if tensor.dim() > 1 else Q.F32)
    if rope_factors is not None:
        _add(writer, "rope_freqs.weight", rope_factors, Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Q) -> None:
    tensor = tensor.detach().contiguous()
    if kind == Q.BF16:
        data = tensor.bfloat16().view(torch.uint8).numpy()
    elif kind in _PLAIN:
        data = tensor.to(_PLAIN[kind]).numpy()
    else:
        data = gguf.quantize(tensor.float().numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _tensors(model: PreTrainedModel, head_dim: int) -> dict[str, Tensor]:
    config = model.config
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    stacked: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        if name.endswith("mlp.experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            layer = name.split(".")[2]
            stacked |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        if name.endswith("mlp.experts.down_proj"):
            stacked[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = tensor
            continue
        if _ARCHITECTURES[config.model_type] == gguf.MODEL_ARCH.LLAMA and (
            "q_proj" in name or "k_proj" in name
        ):
            heads = tensor.unflatten(0, (-1, 2, head_dim // 2))  # halves of a head become pairs
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        if "gemma" in config.model_type and name.endswith("norm.weight"):
            tensor = tensor + 1.0
        kind = "." + name.rpartition(".")[2]
        base = names.get_name(name.removesuffix(kind))
        assert base is not None, name
        stacked[base + kind] = tensor
    return stacked


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids) | {each["id"] for each in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
