"""Qwen2 and 2.5: Llama with a bias on query, key and value (Yang et al., 2024)."""

from __future__ import annotations

from pagedinfer.layers.placement import Placement
from pagedinfer.layers.rotary import RotaryEmbedding
from pagedinfer.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from pagedinfer.models.model_config import ModelConfig


class Qwen2DecoderLayer(LlamaDecoderLayer):
    def make_attention(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> LlamaAttention:
        return LlamaAttention(config, layer, rotary, placement, qkv_bias=True, output_bias=False)


class Qwen2ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen2DecoderLayer
