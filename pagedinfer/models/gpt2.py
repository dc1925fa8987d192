"""GPT-2: learned positions, GELU, LayerNorm before each block (Radford et al., 2019)."""

from __future__ import annotations

from torch import Tensor, nn

from pagedinfer.distributed.sharding import shard_evenly, shard_heads
from pagedinfer.layers.activation import activation
from pagedinfer.layers.attention import Attention, AttentionBatch
from pagedinfer.layers.embedding import Embedding, LanguageModelHead, VocabularyEmbedding
from pagedinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from pagedinfer.layers.norm import LayerNorm
from pagedinfer.layers.placement import Placement
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.model_config import ModelConfig


class GPT2Attention(nn.Module):
    """Multi-head attention; positions are in the embedding."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        size, options = config.hidden_size, config.options
        self.head_dim = config.head_dim
        heads = shard_heads(config.num_heads, config.num_heads, placement.group)
        query, key, value = heads.widths(config.head_dim)
        self.c_attn = ColumnParallelLinear(
            size, {"c_attn": [query, key, value]}, bias=True, placement=placement, transposed=True
        )
        self.c_proj = RowParallelLinear(query, size, bias=True, placement=placement, transposed=True)
        scale = config.head_dim**-0.5 if options.get("scale_attn_weights", True) else 1.0
        if options.get("scale_attn_by_inverse_layer_idx"):
            scale /= layer + 1
        self.attention = Attention(
            layer,
            num_heads=heads.query.size,
            num_kv_heads=heads.kv.size,
            head_dim=config.head_dim,
            scale=scale,
        )

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: AttentionBatch) -> Tensor:
        query, key, value = self.c_attn(hidden).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        return self.c_proj(self.attention(query, key, value, kv_cache, attention))  # type: ignore[no-any-return]


class GPT2MLP(nn.Module):
    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        inner = shard_evenly(config.options.get("n_inner") or 4 * size, placement.group)
        self.c_fc = ColumnParallelLinear(
            size, {"c_fc": [inner]}, bias=True, placement=placement, transposed=True
        )
        self.c_proj = RowParallelLinear(inner, size, bias=True, placement=placement, transposed=True)
        self.activation = activation(config.options["activation_function"])

    def forward(self, hidden: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(hidden)))  # type: ignore[no-any-return]


class GPT2Block(nn.Module):
    """Attention and MLP, each on the normalized sum so far."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.options["layer_norm_epsilon"]
        self.ln_1 = LayerNorm(size, epsilon, placement=placement)
        self.attn = GPT2Attention(config, layer, placement)
        self.ln_2 = LayerNorm(size, epsilon, placement=placement)
        self.mlp = GPT2MLP(config, placement)

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: AttentionBatch) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden), kv_cache, attention)
        return hidden + self.mlp(self.ln_2(hidden))  # type: ignore[no-any-return]


class GPT2Model(nn.Module):
    """Embeddings of tokens and positions, layers, final norm."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        self.wte = VocabularyEmbedding(config.vocab_size, size, placement=placement)
        self.wpe = Embedding(config.max_position_embeddings, size, placement=placement)
        self.h = nn.ModuleList(GPT2Block(config, layer, placement) for layer in range(config.num_layers))
        self.ln_f = LayerNorm(size, config.options["layer_norm_epsilon"], placement=placement)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        hidden = self.wte(input_ids) + self.wpe(positions)
        for layer in self.h:
            hidden = layer(hidden, kv_cache, attention)
        return self.ln_f(hidden)  # type: ignore[no-any-return]


class GPT2LMHeadModel(CausalLM):
    """See CausalLM."""

    base_prefix = "transformer."
    ignored_tensors = (r".*\.attn\.(masked_)?bias",)  # causal masks that older checkpoints stored

    def __init__(self, config: ModelConfig, placement: Placement, max_model_len: int) -> None:
        super().__init__()
        if config.options.get("add_cross_attention"):
            raise ValueError("add_cross_attention=True is not supported")
        self.transformer = GPT2Model(config, placement)
        self.lm_head = LanguageModelHead(
            self.transformer.wte, tied=config.tie_word_embeddings, placement=placement
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        return self.transformer(input_ids, positions, kv_cache, attention)  # type: ignore[no-any-return]
