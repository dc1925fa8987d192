"""Qwen3 with mixtures of experts (Yang et al., 2025)."""

from __future__ import annotations

from torch import nn

from pagedinfer.layers.mlp import GatedMLP
from pagedinfer.layers.moe import Experts, MixtureOfExperts
from pagedinfer.layers.placement import Placement
from pagedinfer.models.llama import LlamaForCausalLM
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.qwen3 import Qwen3DecoderLayer


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    """The layers in mlp_only_layers, and those that decoder_sparse_step leaves out, have a plain MLP."""

    def make_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> nn.Module:
        options = config.options
        sparse = (layer + 1) % options["decoder_sparse_step"] == 0
        if not sparse or layer in (options["mlp_only_layers"] or ()):
            return GatedMLP(
                config.hidden_size,
                options["intermediate_size"],
                activation=options["hidden_act"],
                bias=False,
                placement=placement,
            )
        experts = Experts(
            options.get("num_experts") or options["num_local_experts"],
            config.hidden_size,
            options["moe_intermediate_size"],
            activation=options["hidden_act"],
            names=("gate_proj", "up_proj", "down_proj"),
            placement=placement,
        )
        return MixtureOfExperts(
            experts,
            config.hidden_size,
            k=options["num_experts_per_tok"],
            renormalize=options["norm_topk_prob"],
            placement=placement,
        )


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3MoeDecoderLayer
