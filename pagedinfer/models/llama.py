"""Llama 2 and 3, and what else is built like them (Touvron et al., 2023)."""

from __future__ import annotations

from torch import Tensor, nn

from pagedinfer.distributed.sharding import Shard, shard_heads
from pagedinfer.layers import few_rows
from pagedinfer.layers.attention import AttentionBatch, RotaryAttention
from pagedinfer.layers.embedding import LanguageModelHead, VocabularyEmbedding
from pagedinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from pagedinfer.layers.mlp import GatedMLP
from pagedinfer.layers.norm import RMSNorm
from pagedinfer.layers.placement import Placement
from pagedinfer.layers.rotary import RotaryEmbedding
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.model_config import ModelConfig


class LlamaAttention(nn.Module):
    """Grouped-query attention on one fused projection."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rotary: RotaryEmbedding,
        placement: Placement,
        *,
        qkv_bias: bool,
        output_bias: bool,
        scale: float | None = None,
        logit_cap: float = 0.0,
    ) -> None:
        super().__init__()
        heads = shard_heads(config.num_heads, config.num_kv_heads, placement.group)
        self.num_heads, self.num_kv_heads = heads.query.size, heads.kv.size
        self.head_dim = config.head_dim
        self.query_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        query, key, value = heads.widths(self.head_dim)
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, self.projections(query, key, value), bias=qkv_bias, placement=placement
        )
        self.o_proj = RowParallelLinear(query, config.hidden_size, bias=output_bias, placement=placement)
        self.rotary = rotary
        self.attention = RotaryAttention(
            layer,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=scale,
            sliding_window=config.layer_windows[layer],
            logit_cap=logit_cap,
        )

    def projections(self, query: Shard, key: Shard, value: Shard) -> dict[str, list[Shard]]:
        """The names of query, key and value in checkpoints, and this rank's parts of them."""
        return {"q_proj": [query], "k_proj": [key], "v_proj": [value]}

    def head_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """The norms of query and key heads that go in one pass with the rotation: none here."""
        return None, None

    def normalize_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """What else happens to [num_tokens, heads, head_dim] before the rotation: nothing here."""
        return query, key

    def forward(
        self, hidden: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        attended = self.attend(self.qkv_proj(hidden), positions, kv_cache, attention)
        return self.o_proj(attended)  # type: ignore[no-any-return]

    def add_to(
        self, stream: Tensor, norm: RMSNorm, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> None:
        """stream += self(norm(stream)), [num_rows, hidden]: over few rows on one rank."""
        qkv = few_rows.normed_linear(norm, stream, self.qkv_proj)
        few_rows.add_linear(stream, self.attend(qkv, positions, kv_cache, attention), self.o_proj)

    def attend(self, qkv: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch) -> Tensor:
        """From the fused projection to what the output projection takes.

        [num_tokens, query_size + 2 * kv_size] -> [num_tokens, query_size]
        """
        widths = (self.query_size, self.kv_size, self.kv_size)
        query, key, value = qkv.split(widths, dim=-1)  # type: ignore[no-untyped-call]
        query, key = self.normalize_heads(
            query.unflatten(-1, (self.num_heads, self.head_dim)),
            key.unflatten(-1, (self.num_kv_heads, self.head_dim)),
        )
        query_norm, key_norm = self.head_norms()
        return self.attention(  # type: ignore[no-any-return]
            query,
            key,
            value.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            positions,
            self.rotary,
            kv_cache,
            attention,
            query_norm=query_norm,
            key_norm=key_norm,
        )


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each on the normalized residual stream."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        super().__init__()
        epsilon = config.options["rms_norm_eps"]
        placement = placement.deferring_sums()  # of each block, to the norm after it
        self.input_layernorm = RMSNorm(config.hidden_size, epsilon, placement=placement)
        self.self_attn = self.make_attention(config, layer, rotary, placement)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, epsilon, placement=placement)
        self.mlp = self.make_mlp(config, layer, placement)

    def make_attention(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, placement: Placement
    ) -> LlamaAttention:
        bias = bool(config.options.get("attention_bias", False))
        return LlamaAttention(config, layer, rotary, placement, qkv_bias=bias, output_bias=bias)

    def make_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> nn.Module:
        return GatedMLP(
            config.hidden_size,
            config.options["intermediate_size"],
            activation=config.options["hidden_act"],
            bias=bool(config.options.get("mlp_bias", False)),
            placement=placement,
        )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        kv_cache: Tensor,
        attention: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, still to be summed over ranks and added to the residual stream, and that."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, kv_cache, attention)
        hidden = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual

    def add_to(self, stream: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch) -> None:
        """The same over few rows on one rank, added to the residual stream, [num_rows, hidden], at once."""
        self.self_attn.add_to(stream, self.input_layernorm, positions, kv_cache, attention)
        if isinstance(self.mlp, GatedMLP):
            self.mlp.add_to(stream, self.post_attention_layernorm)
        else:
            stream += self.mlp(self.post_attention_layernorm(stream))


class LlamaModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        max_model_len: int,
        layer_class: type[LlamaDecoderLayer],
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size, placement=placement)
        rotary = RotaryEmbedding(config.rope(), max_model_len=max_model_len, device=placement.device)
        self.has_one_rank = placement.group.size == 1
        self.layers = nn.ModuleList(
            layer_class(config, layer, rotary, placement) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.options["rms_norm_eps"], placement=placement.deferring_sums()
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        if self.has_one_rank and few_rows.served(hidden):
            for layer in self.layers:
                layer.add_to(hidden, positions, kv_cache, attention)  # type: ignore[operator]
            return self.norm(hidden)  # type: ignore[no-any-return]
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, kv_cache, attention)
        return self.norm(hidden, residual)  # type: ignore[no-any-return]


class LlamaForCausalLM(CausalLM):
    """Families that differ in their layers alone derive from this."""

    layer_class: type[LlamaDecoderLayer] = LlamaDecoderLayer

    def __init__(self, config: ModelConfig, placement: Placement, max_model_len: int) -> None:
        super().__init__()
        self.model = LlamaModel(config, placement, max_model_len, self.layer_class)
        self.lm_head = LanguageModelHead(
            self.model.embed_tokens, tied=config.tie_word_embeddings, placement=placement
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        return self.model(input_ids, positions, kv_cache, attention)  # type: ignore[no-any-return]
