"""Mixtral: Mistral with a mixture of experts in place of each MLP (Jiang et al., 2024)."""

from __future__ import annotations

from types import MappingProxyType

from torch import nn

from pagedinfer.layers.moe import Experts, MixtureOfExperts
from pagedinfer.layers.placement import Placement
from pagedinfer.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from pagedinfer.models.model_config import ModelConfig


class MixtralDecoderLayer(LlamaDecoderLayer):
    def make_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> nn.Module:
        options = config.options
        experts = Experts(
            options["num_local_experts"],
            config.hidden_size,
            options["intermediate_size"],
            activation=options["hidden_act"],
            names=("w1", "w3", "w2"),
            placement=placement,
        )
        k = options["num_experts_per_tok"]
        return MixtureOfExperts(experts, config.hidden_size, k=k, renormalize=True, placement=placement)


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralDecoderLayer
    checkpoint_names = MappingProxyType({".mlp.": ".block_sparse_moe."})
