"""What an engine is made with, checked when it is made; no torch here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

from pagedinfer.parameter_checks import check_bool, check_choice
from pagedinfer.vllm_names import hint

BLOCK_SIZES = (8, 16, 32, 64)
DTYPES = ("float32", "float16", "bfloat16")
MAX_NUM_SEQS = 1 << 16  # each has its own row in tables on the device and on the host
MAX_NUM_BATCHED_TOKENS = 1 << 24
MAX_BYTES = 1 << 60  # no machine comes near, and a float can hold it
LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The parameters of `LLM`, whose docstring says what each of them does.

    None stands for a default that depends on the model or on the machine and is settled when the engine
    starts.

    Raises:
        ValueError: a value of the wrong type or outside its range; the message names the parameter, the
            value and what would be right.
    """

    model: str  # a folder, a GGUF file or a hub id
    tokenizer: str | None = None  # likewise; None: the model's
    skip_tokenizer_init: bool = False
    revision: str | None = None  # of a hub id: branch, tag or commit
    tokenizer_revision: str | None = None
    download_dir: str | None = None  # a folder; None: the hub client's cache
    hf_token: str | None = None
    chat_template: str | None = None  # Jinja, or the path of a file with it
    dtype: str = "auto"  # "auto" or one of DTYPES
    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    seed: int = 0  # 64 bits
    gpu_memory_utilization: float = 0.92  # share of the free GPU memory, in (0, 1]
    kv_cache_memory_bytes: int | None = None  # bytes
    num_gpu_blocks_override: int | None = None  # blocks
    block_size: int = 16  # tokens
    max_model_len: int | None = None  # tokens
    max_num_seqs: int | None = None  # requests
    max_num_batched_tokens: int | None = None  # tokens a step
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0  # tokens a step; 0: no cap
    watermark: float = 0.0  # share of the KV cache, in [0, 1)
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    swap_space: float | None = None  # GiB of CPU memory
    tensor_parallel_size: int = 1  # ranks
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    nnodes: int = 1  # machines
    node_rank: int = 0  # which of them this is
    master_addr: str = "127.0.0.1"  # of node 0
    master_port: int = 29500
    enforce_eager: bool = False
    disable_cascade_attn: bool = False
    async_scheduling: bool | None = None  # None: with a GPU; just in time by priority
    trace: str | None = None  # a file
    max_logprobs: int = 20  # -1: no limit
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    generation_config: str = "auto"  # "auto", "vllm" or a folder

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPE_ALIASES.get(self.dtype, self.dtype))
        _check_source("model", self.model, "a folder, a GGUF file or a hub id")
        if self.tokenizer is not None:
            _check_source("tokenizer", self.tokenizer, "a folder or a hub id")
        for name in ("revision", "tokenizer_revision", "download_dir", "hf_token", "chat_template", "trace"):
            _check_string(name, getattr(self, name))
        for name in (
            "skip_tokenizer_init",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enforce_eager",
            "disable_cascade_attn",
        ):
            check_bool(name, getattr(self, name))
        if self.async_scheduling is not None:
            check_bool("async_scheduling", self.async_scheduling)
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("device", self.device, ("auto", "cuda", "cpu"))
        check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        check_choice("preemption_mode", self.preemption_mode, ("auto", "swap", "recompute"))
        check_choice("distributed_backend", self.distributed_backend, ("auto", "nccl", "gloo"))
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1, unit="ranks")
        _check_int("nnodes", self.nnodes, 1, unit="machines")
        if self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"tensor_parallel_size must be a multiple of nnodes, {self.nnodes}, since each has as many "
                f"ranks as the others; got {self.tensor_parallel_size}"
            )
        _check_int("node_rank", self.node_rank, 0, self.nnodes - 1)
        if not isinstance(self.master_addr, str) or not self.master_addr:
            raise ValueError(f"master_addr must be the address of node 0, got {self.master_addr!r}")
        _check_int("master_port", self.master_port, 1, 65535)
        _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, above_low=True)
        for name, low, high, unit in (
            ("kv_cache_memory_bytes", 1, MAX_BYTES, "bytes"),
            ("num_gpu_blocks_override", 1, MAX_BYTES, "blocks"),
            ("max_model_len", 2, None, "tokens"),  # of a prompt and of an output
            ("max_num_seqs", 1, MAX_NUM_SEQS, "requests"),
            ("max_num_batched_tokens", 1, MAX_NUM_BATCHED_TOKENS, "tokens"),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high, unit=unit)
        if not isinstance(self.block_size, int) or self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_size must be one of {sizes} tokens, got {self.block_size!r}")
        _check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, unit="tokens")
        _check_float("watermark", self.watermark, 0.0, 1.0, below_high=True)
        check_choice("logprobs_mode", self.logprobs_mode, ("raw_logprobs", "processed_logprobs"))
        _check_int("max_logprobs", self.max_logprobs, -1)
        _check_source("generation_config", self.generation_config, '"auto", "vllm" or a folder')
        if self.swap_space is not None:
            _check_float("swap_space", self.swap_space, 0.0, MAX_BYTES >> 30, unit="GiB")


def unknown_option_message(callee: str, name: str, known: Collection[str] | None = None) -> str:
    """What a TypeError says about a parameter that does not exist, and what to do instead."""
    if known is None:
        known = [field.name for field in fields(EngineConfig)]
    return f"{callee} has no parameter {name!r}{hint(name, known)}"


def _check_source(name: str, value: Any, what: str) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be {what}, as a string, got {value!r}")


def _check_string(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} must be a string that is not empty, got {value!r}")


def _check_int(name: str, value: Any, low: int, high: int | None = None, *, unit: str = "") -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        where = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {where}{' ' * bool(unit)}{unit}, got {value!r}")


def _check_float(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    above_low: bool = False,
    below_high: bool = False,
    unit: str = "",
) -> None:
    right = isinstance(value, int | float) and not isinstance(value, bool)
    right = right and low <= value <= high  # NaN fails the comparison
    if not right or (above_low and value == low) or (below_high and value == high):
        where = f"in {'(' if above_low else '['}{low:g}, {high:g}{')' if below_high else ']'}"
        raise ValueError(f"{name} must be a number {where}{' ' * bool(unit)}{unit}, got {value!r}")
