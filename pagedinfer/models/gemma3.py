"""Gemma 3, text only: Gemma 2 with normalized heads and two rotary embeddings (Gemma Team, 2025)."""

from __future__ import annotations

from torch import Tensor

from pagedinfer.layers.norm import OffsetRMSNorm
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.rope_config import RopeConfig
from pagedinfer.layers.rotary import RotaryEmbedding
from pagedinfer.models.gemma2 import Gemma2Attention, Gemma2DecoderLayer, Gemma2ForCausalLM, Gemma2Model
from pagedinfer.models.model_config import ModelConfig


class Gemma3Attention(Gemma2Attention):
    """Each head of query and key is normalized before it is rotated."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        if config.options.get("attn_logit_softcapping"):
            raise ValueError("attn_logit_softcapping is not supported in Gemma 3, which has no cap")
        super().__init__(config, layer, rotary, placement)
        epsilon = config.options["rms_norm_eps"]
        self.q_norm = OffsetRMSNorm(config.head_dim, epsilon, placement=placement)
        self.k_norm = OffsetRMSNorm(config.head_dim, epsilon, placement=placement)

    def normalize_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(query), self.k_norm(key)


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    attention_class = Gemma3Attention


class Gemma3Model(Gemma2Model):
    layer_class = Gemma3DecoderLayer

    def make_rotaries(
        self, config: ModelConfig, max_model_len: int, placement: Placement
    ) -> list[RotaryEmbedding]:
        """Layers with a window have an embedding of their own, of a smaller base and never stretched."""
        whole = RotaryEmbedding(config.rope(), max_model_len=max_model_len, device=placement.device)
        local = RotaryEmbedding(_local_rope(config), max_model_len=max_model_len, device=placement.device)
        return [local if window else whole for window in config.layer_windows]


def _local_rope(config: ModelConfig) -> RopeConfig:
    nested = (config.options.get("rope_parameters") or {}).get("sliding_attention") or {}
    parameters = {"rope_theta": config.options["rope_local_base_freq"], **nested}
    return RopeConfig.from_config(
        {"rope_parameters": parameters},
        head_dim=config.head_dim,
        max_position=config.max_position_embeddings,
    )


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    model_class = Gemma3Model
