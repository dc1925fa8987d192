"""Says what a model needs of a GPU's memory, what fits, and how fast it can be. Needs no GPU.

    pagedinfer plan MODEL --gpu 24GiB
    pagedinfer plan MODEL --gpu H100-80GB --gpus 2 --max-model-len 32k --lengths 1k 8k

MODEL is a folder with a config.json. Rates are what bandwidth and arithmetic allow, at the shares of them
that large steps reach; a real engine comes near them for large batches.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from pagedinfer.cli.parser import human_integer

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser
    from pagedinfer.planning.plan import Plan

_BATCHES = (1, 8, 64, 256)


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_argument("model", metavar="MODEL", help="folder with the model's config.json")
    parser.add_argument("--gpu", required=True, help="its memory, such as 24GiB, or its name, such as H200")
    parser.add_argument(
        "--gpus", "-tp", type=human_integer, default=1, metavar="N", help="how many (default: 1)"
    )
    for name, meaning in (
        ("max-model-len", "tokens of the longest request"),
        ("max-num-seqs", "requests that run at once"),
        ("max-num-batched-tokens", "tokens of a step"),
        ("block-size", "tokens of a KV block (default: 16)"),
    ):
        default = 16 if name == "block-size" else None
        parser.add_argument(f"--{name}", type=human_integer, default=default, metavar="N", help=meaning)
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the checkpoint's)")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, metavar="SHARE", help="(default: 0.92)"
    )
    parser.add_argument("--enforce-eager", action="store_true", help="plan without CUDA graphs")
    parser.add_argument(
        "--lengths", type=human_integer, nargs="+", metavar="N", help="lengths of requests, in tokens"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan on stdout."""
    from pagedinfer.models.model_config import ModelConfig
    from pagedinfer.planning.gpus import find_gpu
    from pagedinfer.planning.plan import Settings, make_plan

    config = ModelConfig.from_pretrained(arguments.model)
    settings = Settings(
        dtype=arguments.dtype,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        block_size=arguments.block_size,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enforce_eager=arguments.enforce_eager,
        tensor_parallel_size=arguments.gpus,
    )
    plan = make_plan(config, find_gpu(arguments.gpu), settings)
    lengths = arguments.lengths or _lengths(plan.max_model_len)
    print(json.dumps(_as_dict(plan, lengths), indent=2) if arguments.json else _text(plan, lengths))
    return 0


def _lengths(longest: int) -> list[int]:
    return sorted({min(length, longest) for length in (512, 2048, 8192, longest)})


def _text(plan: Plan, lengths: list[int]) -> str:
    from pagedinfer.runner.memory import describe_bytes

    each = " each" if plan.num_gpus > 1 else ""
    lines = [
        f"{plan.num_gpus} x {plan.gpu.name}, {describe_bytes(plan.memory)}{each}; "
        f"{plan.parameters.total / 1e9:.2f} billion parameters in {plan.dtype}",
        "",
    ]
    for name, num_bytes in _bytes(plan).items():
        lines.append(f"  {name:<28}{describe_bytes(num_bytes):>12}")
    lines += [
        "",
        f"  KV cache: {plan.num_kv_tokens:,} tokens ({plan.num_blocks:,} blocks of {plan.block_size}); the "
        f"longest request has {plan.max_model_len:,}",
    ]
    for length in lengths:
        lines.append(f"  requests of {length:,} tokens at once: {plan.requests_of(length):,}")
    lines.append("")
    rates = _decode(plan, lengths[0])
    for rate in rates:
        lines.append(
            f"  decoding {rate['requests']:,} at once, of {lengths[0]:,} tokens: at most "
            f"{rate['tokens_per_second']:,.0f} tokens/s, {1e3 * rate['seconds_a_step']:.1f} ms a step"
        )
    prefill = plan.prefill_tokens_per_second()
    if prefill is not None:
        lines.append(f"  prompts: at most {prefill:,.0f} tokens/s")
    if not rates:
        lines.append("  rates: name the GPU (--gpu H100-80GB) to have them")
    return "\n".join([*lines, "", *_wishes(plan)])


def _wishes(plan: Plan) -> list[str]:
    """Which parameter to change for what one wants."""
    from pagedinfer.engine.advice import Facts, advise

    facts = Facts(
        device="cuda",
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_kv_tokens=plan.num_kv_tokens,
        max_model_len=plan.max_model_len,
    )
    wishes = [
        "For more requests at once, or longer ones: raise gpu_memory_utilization (to 0.95 at most), lower "
        f"max_num_batched_tokens (its activations take {plan.step / (1 << 30):.1f} GiB), or take more GPUs.",
        "For a shorter time to the first token beside others: lower max_num_batched_tokens.",
        "For more throughput: more requests at once, as long as a step is bound by the weights that it "
        "reads.",
    ]
    return wishes + [f"{advice.parameter}: {advice.why}" for advice in advise(facts)]


def _bytes(plan: Plan) -> dict[str, int]:
    return {
        "weights": plan.weights,
        "activations": plan.step,
        "CUDA graphs": plan.graphs,
        "CUDA's own": plan.outside,
        "margin": plan.margin,
        "KV cache": plan.kv_cache,
    }


def _decode(plan: Plan, context: int) -> list[dict[str, float]]:
    rates = []
    for requests in _BATCHES:
        seconds = plan.decode_seconds(requests, context)
        if seconds is not None and requests <= plan.requests_of(context):
            rates.append(
                {
                    "requests": requests,
                    "context": context,
                    "seconds_a_step": seconds,
                    "tokens_per_second": requests / seconds,
                }
            )
    return rates


def _as_dict(plan: Plan, lengths: list[int]) -> dict[str, Any]:
    return {
        "gpu": plan.gpu.name,
        "gpus": plan.num_gpus,
        "dtype": plan.dtype,
        "parameters": plan.parameters.total,
        "bytes": _bytes(plan),
        "kv_tokens": plan.num_kv_tokens,
        "blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "requests_at_once": {str(length): plan.requests_of(length) for length in lengths},
        "decode": _decode(plan, lengths[0]),
        "prefill_tokens_per_second": plan.prefill_tokens_per_second(),
    }
