"""What a GPU holds besides weights and KV cache, from a model's shape. The engine measures it instead.

The activations of the largest step, as torch holds them; what CUDA graphs share; what is outside torch.
tests/planning holds the formulas to what engines measured on an H200.
"""

from __future__ import annotations

from pagedinfer.models.model_config import ModelConfig
from pagedinfer.runner.graph_sizes import decode_sizes, forward_sizes
from pagedinfer.runner.memory import MIB

CONTEXT_BYTES = 527 * MIB  # of a process that uses CUDA, before it allocates anything
OUTSIDE_BYTES = 234 * MIB  # kernels and cuBLAS, outside torch's allocator
_STEP_BYTES = 71 * MIB  # of a step of any size: buffers of the attention and of cuBLAS
_GRAPHS_BYTES = 40 * MIB  # that graphs of any size share
_GRAPH_BYTES = MIB  # that each takes of the driver's memory
_COUNT_BYTES = 2  # of how often a slot has drawn a token, for penalties
_LOGIT_BYTES = 4  # once penalties and the like are in


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
    values = tokens * width
    inner, qkv = _mlp_size(config) // ranks, _qkv_size(config) // ranks
    # The peak is in the MLP. Its inner values take the place of the attention's where they fit in it.
    gate_up, activated = 2 * values * inner, values * inner
    attention = values * qkv
    left = attention if activated > attention else attention - activated
    peak = _STEP_BYTES + gate_up + activated + left + 3 * values * config.hidden_size
    # Then come the logits, which take the place of the largest of these values where they fit.
    rows = min(seqs, tokens)
    room = gate_up
    for num_bytes in (rows * config.vocab_size * width, rows * config.vocab_size * _LOGIT_BYTES):
        if num_bytes <= room:
            room -= num_bytes
        else:
            peak += num_bytes
    counts = seqs * config.vocab_size * _COUNT_BYTES
    tables = 2 * 4 * seqs * -(-max_model_len // block_size)
    return peak + counts + tables


def graph_bytes(config: ModelConfig, width: int, ranks: int, seqs: int, tokens: int) -> int:
    """Of all CUDA graphs: the memory that they share, and the driver's for each; arguments as `step_bytes`'.

    The multiples, of a token's values and of its logits, are held to measurements by tests/planning.
    """
    decodes, others = decode_sizes(seqs), forward_sizes(tokens)
    a_token = (3 * _mlp_size(config) + _qkv_size(config)) // ranks + 5 * config.hidden_size
    logits = 5 * decodes[-1] * config.vocab_size // 4
    shared = _GRAPHS_BYTES + others[-1] * a_token * width + logits
    return shared + _GRAPH_BYTES * len(decodes + others)


def _mlp_size(config: ModelConfig) -> int:
    """Of the inner values of a layer's MLP."""
    options = config.options
    inner = options.get("intermediate_size") or options.get("ffn_dim") or options.get("n_inner")
    return int(inner or 4 * config.hidden_size)


def _qkv_size(config: ModelConfig) -> int:
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
