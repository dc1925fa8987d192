"""The tensors of a GGUF file, under the names and in the layout that other checkpoints have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedinfer.errors import WeightsError
from pagedinfer.models.checkpoint import CheckpointFile, OpenFile
from pagedinfer.models.gguf_config import read_gguf

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""All experts' in one tensor, and what one expert's is called."""
_MIXTRAL = {"mlp.gate": "block_sparse_moe.gate", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""What Mixtral's checkpoints have instead."""

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_UNUSED = ("rope_freqs.weight",)  # gguf_config has made use of it
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """What the metadata, which only the first of several files has, say about all tensors."""

    pairs: Mapping[str, int]
    """Projections whose rows are stored as pairs that rotate together, and the heads of each; llama's."""
    is_mixtral: bool
    is_gemma: bool
    """Whose norms have one added to their weights here."""

    @classmethod
    def read(cls, path: Path) -> GGUFLayout:
        """From the first file.

        Raises:
            ValueError: as `read_gguf`.
        """
        fields = read_gguf(path).fields

        def value(name: str) -> Any:
            return fields[name].contents() if name in fields else None

        architecture = value("general.architecture")
        if architecture != "llama":
            return cls({}, is_mixtral=False, is_gemma=architecture in ("gemma2", "gemma3"))
        num_heads = value("llama.attention.head_count")
        num_kv_heads = value("llama.attention.head_count_kv") or num_heads
        return cls(
            {"attn_q": num_heads, "attn_k": num_kv_heads},
            is_mixtral=bool(value("llama.expert_count")),
            is_gemma=False,
        )


class GGUFFile(CheckpointFile):
    """Tensors in float32, float16 and bfloat16 are mapped; a quantized one becomes float32 when it is got."""

    def __init__(self, path: Path, layout: GGUFLayout) -> None:
        super().__init__(path)
        self._layout = layout

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        yield self._tensors

    @cached_property
    def _tensors(self) -> _OpenGGUF:
        try:
            return _OpenGGUF(read_gguf(self.path), self._layout, str(self.path))
        except ValueError as error:
            raise WeightsError(str(error)) from None


class _OpenGGUF(OpenFile):
    def __init__(self, reader: Any, layout: GGUFLayout, path: str) -> None:
        self._layout, self._path = layout, path
        self._places: dict[str, tuple[Any, int | None]] = {}
        """The tensor of each name, and which part of it where experts are stacked."""
        for tensor in reader.tensors:
            if tensor.name not in _UNUSED:
                self._places |= self._entries(tensor.name, tensor)

    def names(self) -> list[str]:
        return list(self._places)

    def get(self, name: str) -> Tensor:
        tensor, part = self._places[name]
        values = self._values(tensor, part)
        match = _LAYER.fullmatch(tensor.name)
        if match is not None and match[2] in self._layout.pairs:
            return _split_halves(values, self._layout.pairs[match[2]])
        if self._layout.is_gemma and tensor.name.endswith("norm.weight"):
            return values.float() - 1.0
        return values

    def _entries(self, name: str, tensor: Any) -> dict[str, tuple[Any, int | None]]:
        """What other checkpoints have for one tensor; a name that is not known stays, and is unexpected."""
        match = _LAYER.fullmatch(name)
        if match is None:
            base, _, kind = name.rpartition(".")
            return {f"{_NAMES.get(base, base)}.{kind}": (tensor, None)}
        layer, base, kind = f"model.layers.{match[1]}", match[2], match[3]
        if base in _STACKED:
            experts, each = ("mlp.experts", _STACKED[base])
            if self._layout.is_mixtral:
                experts, each = "block_sparse_moe.experts", _MIXTRAL[each]
            count = int(tensor.shape[-1])
            return {f"{layer}.{experts}.{i}.{each}.{kind}": (tensor, i) for i in range(count)}
        ours = _LAYER_NAMES.get(base, base)
        if self._layout.is_gemma:
            ours = _GEMMA.get(base, ours)
        if self._layout.is_mixtral:
            ours = _MIXTRAL.get(ours, ours)
        return {f"{layer}.{ours}.{kind}": (tensor, None)}

    def _values(self, tensor: Any, part: int | None) -> Tensor:
        data: np.ndarray[Any, Any] = tensor.data if part is None else tensor.data[part]
        kind = tensor.tensor_type.name
        if kind == "BF16":
            return torch.from_numpy(data).view(torch.bfloat16)
        if kind in _PLAIN:
            return torch.from_numpy(data)
        from gguf import dequantize

        try:
            return torch.from_numpy(dequantize(data, tensor.tensor_type))
        except NotImplementedError:
            raise WeightsError(
                f"{tensor.name} in {self._path} is {kind}, which the gguf package cannot dequantize"
            ) from None


def _split_halves(values: Tensor, num_heads: int) -> Tensor:
    """Llama's query and key rows are stored as pairs that rotate together, elsewhere as halves of a head."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
