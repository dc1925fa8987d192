"""Over how many ranks a model can be divided. Torch-free."""

from __future__ import annotations

from pagedinfer.distributed.sharding import fits_heads
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import find_family


def possible_sizes(config: ModelConfig) -> list[int]:
    """The values of tensor_parallel_size that the model's dimensions allow, ascending.

    Each rank needs as many query heads and as much of every feed-forward block as the others. KV heads may be
    fewer than the ranks, and the vocabulary is padded.
    """
    inner_sizes = find_family(config.architecture).inner_sizes(config.options).values()
    return [
        size
        for size in range(1, config.num_heads + 1)
        if fits_heads(config.num_heads, config.num_kv_heads, size)
        and all(inner % size == 0 for inner in inner_sizes)
    ]


def check_tensor_parallel_size(config: ModelConfig, size: int) -> None:
    """Raises ValueError if the model cannot be divided over so many ranks; the message lists what can be."""
    possible = possible_sizes(config)
    if size in possible:
        return
    inner = find_family(config.architecture).inner_sizes(config.options)
    listed = ", ".join(f"{name} {value}" for name, value in inner.items())
    raise ValueError(
        f"tensor_parallel_size={size} does not divide this model: {config.num_heads} attention heads, "
        f"{config.num_kv_heads} KV heads, {listed}; possible are {', '.join(map(str, possible))}"
    )
