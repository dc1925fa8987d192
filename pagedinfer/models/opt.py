"""OPT: learned positions, ReLU, LayerNorm before or after each block (Zhang et al., 2022)."""

from __future__ import annotations

from torch import Tensor, nn

from pagedinfer.distributed.sharding import shard_evenly, shard_heads
from pagedinfer.layers.activation import activation
from pagedinfer.layers.attention import Attention, AttentionBatch
from pagedinfer.layers.embedding import Embedding, LanguageModelHead, VocabularyEmbedding
from pagedinfer.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from pagedinfer.layers.norm import LayerNorm
from pagedinfer.layers.placement import Placement
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.model_config import ModelConfig

_POSITION_OFFSET = 2
_EPSILON = 1e-5


class OPTAttention(nn.Module):
    """Multi-head attention on one fused projection; positions are in the embedding."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.options["enable_bias"]
        self.head_dim = config.head_dim
        heads = shard_heads(config.num_heads, config.num_heads, placement.group)
        query, key, value = heads.widths(config.head_dim)
        parts = {"q_proj": [query], "k_proj": [key], "v_proj": [value]}
        self.qkv_proj = ColumnParallelLinear(size, parts, bias=bias, placement=placement)
        self.out_proj = RowParallelLinear(query, size, bias=bias, placement=placement)
        self.attention = Attention(
            layer, num_heads=heads.query.size, num_kv_heads=heads.kv.size, head_dim=config.head_dim
        )

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: AttentionBatch) -> Tensor:
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        return self.out_proj(self.attention(query, key, value, kv_cache, attention))  # type: ignore[no-any-return]


class OPTDecoderLayer(nn.Module):
    """Attention and MLP; each block is normalized before it, or (the 350M model) with its sum after it."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        size = config.hidden_size
        inner = shard_evenly(config.options["ffn_dim"], placement.group)
        bias = config.options["enable_bias"]
        self.norm_before = config.options["do_layer_norm_before"]
        self.self_attn = OPTAttention(config, layer, placement)
        self.self_attn_layer_norm = LayerNorm(size, _EPSILON, placement=placement)
        self.fc1 = ColumnParallelLinear(size, {"fc1": [inner]}, bias=bias, placement=placement)
        self.fc2 = RowParallelLinear(inner, size, bias=bias, placement=placement)
        self.final_layer_norm = LayerNorm(size, _EPSILON, placement=placement)
        self.activation = activation(config.options["activation_function"])

    def forward(self, hidden: Tensor, kv_cache: Tensor, attention: AttentionBatch) -> Tensor:
        if self.norm_before:
            hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), kv_cache, attention)
            return hidden + self._mlp(self.final_layer_norm(hidden))
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden, kv_cache, attention))
        return self.final_layer_norm(hidden + self._mlp(hidden))  # type: ignore[no-any-return]

    def _mlp(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(hidden)))  # type: ignore[no-any-return]


class OPTDecoder(nn.Module):
    """Embeddings of tokens and positions, layers, and where it is there the final norm.

    The token embedding may be narrower than the hidden size; then it is projected in and out.
    """

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        options, size = config.options, config.hidden_size
        width = options.get("word_embed_proj_dim") or size
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, width, placement=placement)
        self.embed_positions = Embedding(
            config.max_position_embeddings + _POSITION_OFFSET, size, placement=placement
        )
        self.project_in = self.project_out = None
        if width != size:
            self.project_in = Linear(width, size, bias=False, placement=placement)
            self.project_out = Linear(size, width, bias=False, placement=placement)
        self.layers = nn.ModuleList(
            OPTDecoderLayer(config, layer, placement) for layer in range(config.num_layers)
        )
        self.final_layer_norm = None
        if options["do_layer_norm_before"] and not options.get("_remove_final_layer_norm"):
            self.final_layer_norm = LayerNorm(size, _EPSILON, placement=placement)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + self.embed_positions(positions + _POSITION_OFFSET)
        for layer in self.layers:
            hidden = layer(hidden, kv_cache, attention)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return hidden


class OPTModel(nn.Module):
    """One more level in the names of checkpoints."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, placement)


class OPTForCausalLM(CausalLM):
    """See CausalLM."""

    def __init__(self, config: ModelConfig, placement: Placement, max_model_len: int) -> None:
        super().__init__()
        if not config.options["layer_norm_elementwise_affine"]:
            raise ValueError("layer_norm_elementwise_affine=False is not supported")
        self.model = OPTModel(config, placement)
        self.lm_head = LanguageModelHead(
            self.model.decoder.embed_tokens, tied=config.tie_word_embeddings, placement=placement
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attention: AttentionBatch
    ) -> Tensor:
        return self.model.decoder(input_ids, positions, kv_cache, attention)  # type: ignore[no-any-return]
