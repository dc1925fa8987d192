"""The flags of the engine: one for each parameter of EngineConfig, made from its types."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, get_args, get_type_hints

from pagedinfer.cli.parser import Parser, human_integer
from pagedinfer.config import EngineConfig

_HELP = {
    "model": "folder of a checkpoint, a GGUF file, or the id of either on the Hugging Face hub",
    "tokenizer": "folder of the tokenizer; the model's by default",
    "skip_tokenizer_init": "load no tokenizer: token ids in, token ids out",
    "revision": "of a model on the hub: branch, tag or commit",
    "tokenizer_revision": "likewise of a tokenizer that is named",
    "download_dir": "folder to fetch models into, instead of the hub client's cache",
    "hf_token": "for models of the hub that need one; better in HF_TOKEN",
    "chat_template": "file with the Jinja template of chats, instead of the tokenizer's",
    "dtype": "of weights, activations and KV cache: float32, float16, bfloat16; auto: the checkpoint's",
    "load_format": "dummy: random weights, for which config.json is enough",
    "device": "auto: the GPU if there is one that can be used",
    "seed": "of the requests that bring none of their own",
    "gpu_memory_utilization": "share of the free GPU memory to use for weights, activations and KV cache",
    "kv_cache_memory_bytes": "bytes of the KV cache, instead of what gpu-memory-utilization leaves",
    "num_gpu_blocks_override": "blocks of the KV cache, instead of as many as there is room for",
    "block_size": "tokens in a block of the KV cache: 8, 16, 32 or 64",
    "max_model_len": "longest request in tokens, prompt and output together",
    "max_num_seqs": "most requests that run at the same time",
    "max_num_batched_tokens": "most tokens that one step computes",
    "enable_chunked_prefill": "compute long prompts in chunks beside the decoding of others",
    "enable_prefix_caching": "reuse the KV of prompts that begin with the same tokens",
    "scheduling_policy": "first come first served, or by the requests' priority",
    "long_prefill_token_threshold": "most tokens of one prompt in a step while others run; 0: no limit",
    "watermark": "share of the KV cache that admission leaves free, in [0, 1)",
    "preemption_mode": "what happens to a running request whose blocks another one needs",
    "swap_space": "GiB of CPU memory to swap to",
    "tensor_parallel_size": "GPUs (on a CPU: processes) that share the model",
    "distributed_backend": "what connects them: NCCL, or gloo through the CPU",
    "nnodes": "machines that they are on, as many on each",
    "node_rank": "which of the machines this is; only 0 serves, the others lend it their GPUs",
    "master_addr": "of machine 0, as the others reach it",
    "master_port": "of machine 0, for the others",
    "enforce_eager": "launch steps kernel by kernel, without CUDA graphs",
    "disable_cascade_attn": "have each request read all of its KV, also a long prefix that others share",
    "async_scheduling": "plan a step while the one before runs (default: with a GPU)",
    "trace": "write each step's schedule, and what decided it, into this file; .gz compresses it",
    "max_logprobs": "most log-probabilities that a request may ask for at a position; -1: no limit",
    "logprobs_mode": "of the model's distribution, or of what is drawn from",
    "generation_config": "defaults of sampling: auto: the model's; vllm: none; or a folder",
}
_SHORT = {"tensor_parallel_size": ["-tp"]}


def add_engine_arguments(parser: Parser, *, positional_model: bool = True) -> None:
    """Adds a flag for each parameter; the model is a positional argument, and a flag too."""
    group: Any = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name == "model" and positional_model:
            parser.add_argument("model", nargs="?", metavar="MODEL", help=_HELP["model"])
            continue
        flags = [f"--{field.name.replace('_', '-')}", *_SHORT.get(field.name, [])]
        default = None if field.default is dataclasses.MISSING else field.default
        shown = "" if default is None else f" (default: {default})"
        options: dict[str, Any] = {"default": default, "help": (_HELP[field.name] + shown).replace("%", "%%")}
        group.add_argument(*flags, **options, **_kind(hints[field.name]))


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration that these flags ask for.

    Raises:
        ValueError: as EngineConfig.
    """
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    return EngineConfig(**{name: getattr(arguments, name) for name in names})


def _kind(hint: Any) -> dict[str, Any]:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return {"choices": kinds}
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if int in kinds:
        return {"type": human_integer, "metavar": "N"}
    if float in kinds:
        return {"type": float, "metavar": "X"}
    return {"metavar": "TEXT"}
