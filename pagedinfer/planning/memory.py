"""What a GPU holds besides weights and KV cache, from a model's shape. The engine measures it instead.

The tensors of a step, in the order in which they come and go, through the rules of torch's allocator; what
CUDA graphs share; what is outside torch. tests/planning holds this to what engines measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedinfer.models.model_config import ModelConfig
from pagedinfer.planning.caching_allocator import Block, CachingAllocator
from pagedinfer.planning.parameters import rotary_table_bytes
from pagedinfer.runner.graph_sizes import decode_sizes, forward_sizes
from pagedinfer.runner.memory import MIB

CONTEXT_BYTES = 527 * MIB  # of a process that uses CUDA, before it allocates anything
OUTSIDE_BYTES = 234 * MIB  # kernels and cuBLAS, outside torch's allocator
_CUBLAS_BYTES = 32 * MIB  # of cuBLAS on each stream, in torch's allocator
_GRAPH_LAYER_BYTES = 32 * 1024  # of the driver's memory: some ten kernels of 3 KiB
_PARTIAL_RESULTS = 132 * 2 * 17  # of the attention: multiprocessors, blocks on each, parts of each
_PARTIAL_ROWS = 16  # at most, in each of these
_INDEX_BYTES = 32  # of a token: its id, position, place in the cache and the like
_TABLE_BYTES = 4  # of a block in a block table
_COUNT_BYTES = 2  # of how often a slot has drawn a token, for penalties
_LOGIT_BYTES = 4  # once penalties and the like are in
_LAYERS = 3  # the others find the memory that these have left


def step_bytes(
    config: ModelConfig, width: int, ranks: int, seqs: int, tokens: int, max_model_len: int, block_size: int
) -> int:
    """Of the largest step: activations, logits, and the tables of the requests in the slots.

    Args:
        config: of the model.
        width: bytes of an activation.
        ranks: that share the model.
        seqs, tokens, max_model_len, block_size: the engine's limits.
    """
    values = _Values.of(config, width, ranks)
    rows = min(seqs, tokens)
    tables = seqs * -(-max_model_len // block_size) * _TABLE_BYTES
    allocator = CachingAllocator()
    allocator.allocate(rotary_table_bytes(config, max_model_len))  # of the weights, and may leave room
    before = allocator.reserved
    for num_bytes in (_CUBLAS_BYTES, tables, seqs * config.vocab_size * _COUNT_BYTES):
        allocator.allocate(num_bytes)
    _run_model(allocator, values, tokens, 0, is_decode=False)
    sampled = allocator.allocate(rows * values.hidden)
    allocator.allocate(rows * values.logits)
    allocator.free(sampled)
    allocator.allocate(rows * config.vocab_size * _LOGIT_BYTES)
    return allocator.reserved - before + tables  # once more: a step gathers its rows


def graph_bytes(
    config: ModelConfig, width: int, ranks: int, seqs: int, tokens: int, max_model_len: int, block_size: int
) -> int:
    """Of all CUDA graphs: the memory that they share, and the driver's; arguments as `step_bytes`'."""
    values = _Values.of(config, width, ranks)
    table = -(-max_model_len // block_size) * _TABLE_BYTES
    decodes, others = decode_sizes(seqs), forward_sizes(tokens)
    pool = CachingAllocator()
    pool.allocate(_CUBLAS_BYTES)
    for size in (decodes[-1], *decodes[:-1]):
        hidden = _run_model(pool, values, size, size * table, is_decode=True)
        pool.free(pool.allocate(size * values.logits), hidden)
    for size in (others[-1], *others[:-1]):
        pool.free(_run_model(pool, values, size, min(size, seqs) * table, is_decode=False))
    outside_pool = CachingAllocator()  # where the graphs leave the hidden states
    outside_pool.allocate(others[-1] * values.hidden)
    driver = len(decodes + others) * config.num_layers * _GRAPH_LAYER_BYTES
    return pool.reserved + outside_pool.reserved + driver


@dataclass(frozen=True, slots=True)
class _Values:
    """Bytes that a token's values take on a rank."""

    hidden: int
    query: int
    qkv: int
    inner: int  # of the MLP
    logits: int
    partial: int  # of a row of the attention's partial results
    group: int  # query heads that share a KV head

    @staticmethod
    def of(config: ModelConfig, width: int, ranks: int) -> _Values:
        options = config.options
        inner = options.get("intermediate_size") or options.get("ffn_dim") or options.get("n_inner")
        query, key = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        return _Values(
            hidden=config.hidden_size * width,
            query=query * width // ranks,
            qkv=(query + 2 * key) * width // ranks,
            inner=int(inner or 4 * config.hidden_size) * width // ranks,
            logits=config.vocab_size * width,
            partial=(config.head_dim + 2) * 4,
            group=config.num_heads // config.num_kv_heads,
        )


def _run_model(
    allocator: CachingAllocator, values: _Values, tokens: int, table_bytes: int, *, is_decode: bool
) -> Block:
    """The model's part of a step: takes and frees in its order; gives the hidden states, not freed."""

    def take(bytes_a_token: int) -> Block:
        return allocator.allocate(tokens * bytes_a_token)

    inputs = [take(_INDEX_BYTES), allocator.allocate(table_bytes)]
    residual, outputs = take(values.hidden), list[Block]()
    for layer in range(_LAYERS):
        normed, qkv = take(values.hidden), take(values.qkv)
        if layer == 0:
            rows = min(_PARTIAL_ROWS, values.group * (1 if is_decode else tokens))
            inputs.append(allocator.allocate(_PARTIAL_RESULTS * rows * values.partial))
        attended = take(values.query)
        allocator.free(qkv)
        projected = take(values.hidden)
        allocator.free(attended, normed)
        normed = take(values.hidden)
        allocator.free(projected)
        gate_up, activated = take(2 * values.inner), take(values.inner)
        allocator.free(gate_up)
        output = take(values.hidden)
        allocator.free(activated, normed, *outputs)
        outputs = [output]
    hidden = take(values.hidden)
    allocator.free(residual, *outputs, *inputs)
    return hidden
