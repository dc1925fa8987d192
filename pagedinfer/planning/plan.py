"""What a model takes of a GPU's memory, what fits in the rest, and how fast it can be at most."""

from __future__ import annotations

from dataclasses import dataclass

from pagedinfer.distributed.limits import check_tensor_parallel_size
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.planning.gpus import Gpu
from pagedinfer.planning.memory import CONTEXT_BYTES, OUTSIDE_BYTES, graph_bytes, step_bytes
from pagedinfer.planning.parameters import Parameters, count_parameters, rotary_table_bytes
from pagedinfer.runner.memory import Memory, default_limits, margin, size_kv_cache

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# Measured on an H200; others are of the same order.
_BANDWIDTH_SHARE = 0.9  # of what the maker says, that a copy or a decode reaches
_FLOPS_SHARE = 0.8  # likewise of a large product


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's parameters that a plan depends on; None: the engine's default."""

    dtype: str | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes on each GPU, and what follows from them."""

    gpu: Gpu
    num_gpus: int
    dtype: str
    parameters: Parameters
    memory: int  # of the GPU
    weights: int  # tables for positions included
    step: int  # activations of the largest step, and the tables of the running requests
    graphs: int
    outside: int  # of torch's allocator
    margin: int
    kv_cache: int
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    token_kv_bytes: int  # on all GPUs together

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache has room for."""
        return self.num_blocks * self.block_size

    def requests_of(self, num_tokens: int) -> int:
        """How many requests of so many tokens fit at once, slots permitting."""
        blocks = -(-num_tokens // self.block_size)
        return min(self.max_num_seqs, self.num_blocks // max(1, blocks))

    def decode_seconds(self, num_requests: int, context: int) -> float | None:
        """The least that a step of so many decodes takes, by what it reads and what it multiplies.

        None if the GPU's bandwidth or arithmetic is not known.
        """
        gpu, parameters = self.gpu, self.parameters
        if gpu.bandwidth is None or gpu.flops is None:
            return None
        touched = 1 - (1 - parameters.expert_share) ** num_requests  # of the experts
        read = parameters.matrices + touched * parameters.experts + parameters.small + parameters.head
        num_bytes = read * DTYPE_BYTES[self.dtype] + num_requests * context * self.token_kv_bytes
        flops = 2 * num_requests * (parameters.a_token + parameters.head)
        by_bytes = num_bytes / (gpu.bandwidth * _BANDWIDTH_SHARE)
        by_flops = flops / (gpu.flops * _FLOPS_SHARE)
        return max(by_bytes, by_flops) / self.num_gpus

    def prefill_tokens_per_second(self) -> float | None:
        """The most prompt tokens that the GPUs can compute, attention left out; None as `decode_seconds`."""
        if self.gpu.flops is None:
            return None
        return self.gpu.flops * _FLOPS_SHARE * self.num_gpus / (2 * self.parameters.a_token)


def make_plan(config: ModelConfig, gpu: Gpu, settings: Settings = Settings()) -> Plan:
    """The plan of a model on one or several GPUs.

    Raises:
        ValueError: a dtype that there is not, or what an engine would refuse too: a max_model_len beyond the
            model's, a number of GPUs that does not divide it.
        OutOfMemoryError: it does not fit; the message says what would.
    """
    dtype = settings.dtype or config.dtype or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    width, ranks = DTYPE_BYTES[dtype], settings.tensor_parallel_size
    config.check_max_model_len(settings.max_model_len)
    check_tensor_parallel_size(config, ranks)
    seqs, tokens = default_limits(gpu.memory)
    seqs, tokens = settings.max_num_seqs or seqs, settings.max_num_batched_tokens or tokens
    wanted_len = settings.max_model_len or config.max_model_len
    parameters = count_parameters(config)
    weights = weight_bytes(config, parameters, width, ranks, wanted_len)
    limits = (seqs, tokens, wanted_len, settings.block_size)
    step = step_bytes(config, width, ranks, *limits)
    graphs = 0 if settings.enforce_eager else graph_bytes(config, width, ranks, *limits)
    spare = margin(step)
    free = gpu.memory - CONTEXT_BYTES
    left = int(free * settings.gpu_memory_utilization) - weights - step - graphs - OUTSIDE_BYTES - spare
    if settings.kv_cache_memory_bytes is not None:
        left = settings.kv_cache_memory_bytes
    kv_heads = max(1, config.num_kv_heads // ranks)
    token_bytes = config.num_layers * 2 * kv_heads * config.head_dim * width
    size = size_kv_cache(
        available_bytes=left,
        block_bytes=token_bytes * settings.block_size,
        block_size=settings.block_size,
        model_max_len=config.max_model_len,
        max_model_len=settings.max_model_len,
        num_blocks_override=None,
        memory=Memory(gpu.memory, free),
        parameter="gpu_memory_utilization, or take a larger GPU or more of them (--gpus)",
    )
    return Plan(
        gpu=gpu,
        num_gpus=ranks,
        dtype=dtype,
        parameters=parameters,
        memory=gpu.memory,
        weights=weights,
        step=step,
        graphs=graphs,
        outside=OUTSIDE_BYTES,
        margin=spare,
        kv_cache=size.num_blocks * token_bytes * settings.block_size,
        block_bytes=token_bytes * settings.block_size,
        num_blocks=size.num_blocks,
        block_size=settings.block_size,
        max_model_len=size.max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        token_kv_bytes=token_bytes * ranks,
    )


def weight_bytes(
    config: ModelConfig, parameters: Parameters, width: int, ranks: int, max_model_len: int
) -> int:
    """Of one rank: its share of the matrices and all of what is small."""
    shared = parameters.total - parameters.small
    return (-(-shared // ranks) + parameters.small) * width + rotary_table_bytes(config, max_model_len)
