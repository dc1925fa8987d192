"""Gemma 2: a norm before and after each block, alternating windows, soft caps (Gemma Team, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagedinfer.layers.attention import AttentionBatch
from pagedinfer.layers.embedding import LanguageModelHead, VocabularyEmbedding
from pagedinfer.layers.mlp import GatedMLP
from pagedinfer.layers.norm import OffsetRMSNorm
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.rotary import RotaryEmbedding
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.llama import LlamaAttention
from pagedinfer.models.model_config import ModelConfig


class Gemma2Attention(LlamaAttention):
    """Scores have a scale of their own and may be capped."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        options = config.options
        bias = bool(options.get("attention_bias", False))
        super().__init__(
            config,
            layer,
            rotary,
            placement,
            qkv_bias=bias,
            output_bias=bias,
            scale=options["query_pre_attn_scalar"] ** -0.5,
            logit_cap=options.get("attn_logit_softcapping") or 0.0,
        )


class Gemma2DecoderLayer(nn.Module):
    """Attention and MLP, each between two norms."""

    attention_class: type[Gemma2Attention] = Gemma2Attention

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        super().__init__()

        def norm() -> OffsetRMSNorm:
            return OffsetRMSNorm(config.hidden_size, config.options["rms_norm_eps"], placement=placement)

        self.input_layernorm = norm()
        self.self_attn = self.attention_class(config, layer, rotary, placement)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            config.options["intermediate_size"],
            activation=config.options["hidden_activation"],
            bias=False,
            placement=placement,
        )
        self.post_feedforward_layernorm = norm()

    def forward(
        self, hidden: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), positions, kv_cache, attention)
        hidden = self.post_attention_layernorm(attended, hidden)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        return self.post_feedforward_layernorm(fed_forward, hidden)  # type: ignore[no-any-return]


class Gemma2Model(nn.Module):
    """Embedding scaled by the root of its width, layers, final norm."""

    layer_class: type[Gemma2DecoderLayer] = Gemma2DecoderLayer

    def __init__(self, config: ModelConfig, placement: Placement, max_model_len: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, size, placement=placement)
        # Rounded to the model's dtype, as where the checkpoints were trained.
        self.embed_scale = float(torch.tensor(size**0.5, dtype=placement.dtype))
        rotaries = self.make_rotaries(config, max_model_len, placement)
        self.layers = nn.ModuleList(
            self.layer_class(config, layer, rotaries[layer], placement) for layer in range(config.num_layers)
        )
        self.norm = OffsetRMSNorm(size, config.options["rms_norm_eps"], placement=placement)

    def make_rotaries(
        self, config: ModelConfig, max_model_len: int, placement: Placement
    ) -> list[RotaryEmbedding]:
        """Each layer's rotary embedding."""
        rotary = RotaryEmbedding(config.rope(), max_model_len=max_model_len, device=placement.device)
        return [rotary] * config.num_layers

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids) * self.embed_scale
        for layer in self.layers:
            hidden = layer(hidden, positions, kv_cache, attention)
        return self.norm(hidden)  # type: ignore[no-any-return]


class Gemma2ForCausalLM(CausalLM):
    """See CausalLM."""

    model_class: type[Gemma2Model] = Gemma2Model

    def __init__(self, config: ModelConfig, placement: Placement, max_model_len: int) -> None:
        super().__init__()
        if config.options.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention=True is not supported")
        self.model = self.model_class(config, placement, max_model_len)
        self.lm_head = LanguageModelHead(
            self.model.embed_tokens, tied=config.tie_word_embeddings, placement=placement
        )
        self.logit_cap: float | None = config.options.get("final_logit_softcapping")

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        return self.model(input_ids, positions, kv_cache, attention)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        if self.logit_cap is not None:
            logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
        return logits
