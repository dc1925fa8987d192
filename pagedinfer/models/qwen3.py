"""Qwen3: Llama with normalized query and key heads (Yang et al., 2025)."""

from __future__ import annotations

from pagedinfer.layers.norm import RMSNorm
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.rotary import RotaryEmbedding
from pagedinfer.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from pagedinfer.models.model_config import ModelConfig


class Qwen3Attention(LlamaAttention):
    """Each head of query and key is normalized before it is rotated."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        bias = bool(config.options.get("attention_bias", False))
        super().__init__(config, layer, rotary, placement, qkv_bias=bias, output_bias=bias)
        epsilon = config.options["rms_norm_eps"]
        self.q_norm = RMSNorm(config.head_dim, epsilon, placement=placement)
        self.k_norm = RMSNorm(config.head_dim, epsilon, placement=placement)

    def head_norms(self) -> tuple[RMSNorm, RMSNorm]:
        return self.q_norm, self.k_norm


class Qwen3DecoderLayer(LlamaDecoderLayer):
    def make_attention(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> LlamaAttention:
        return Qwen3Attention(config, layer, rotary, placement)


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3DecoderLayer
