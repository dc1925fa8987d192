"""Phi-3 and Phi-4: Llama whose checkpoints have the fused projections (Abdin et al., 2024)."""

from __future__ import annotations

from torch import nn

from pagedinfer.distributed.sharding import Shard
from pagedinfer.layers.mlp import GatedMLP
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.rotary import RotaryEmbedding
from pagedinfer.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from pagedinfer.models.model_config import ModelConfig


class Phi3Attention(LlamaAttention):
    def projections(self, query: Shard, key: Shard, value: Shard) -> dict[str, list[Shard]]:
        return {"qkv_proj": [query, key, value]}


class Phi3DecoderLayer(LlamaDecoderLayer):
    def make_attention(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> LlamaAttention:
        return Phi3Attention(config, layer, rotary, placement, qkv_bias=False, output_bias=False)

    def make_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> nn.Module:
        return GatedMLP(
            config.hidden_size,
            config.options["intermediate_size"],
            activation=config.options["hidden_act"],
            bias=False,
            placement=placement,
            merged=True,
        )


class Phi3ForCausalLM(LlamaForCausalLM):
    layer_class = Phi3DecoderLayer
