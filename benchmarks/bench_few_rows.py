"""Times steps of decodes: the linear layers beside cuBLAS, and the whole model with and without them.

    python benchmarks/bench_few_rows.py                                # Llama-3-8B's and Qwen3-0.6B's shapes
    python benchmarks/bench_few_rows.py --rows 1 --models qwen3-0.6b --json results/few_rows.json
    python benchmarks/bench_few_rows.py --rows 24,64,128 --models llama-3-8b

bfloat16, random weights. A linear layer is timed over several weights in turn, beyond the second-level cache;
"model" is a decode step from token ids to logits with 512 tokens in the cache, all in one CUDA graph, without
sampling. TB/s are those of the weights; `ceiling` is their rate over that of a device-to-device copy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import timing
from model_shapes import SHAPES, write_shape

from pagedinfer import ops
from pagedinfer.layers import decode_rows, few_rows
from pagedinfer.layers.attention import AttentionBatch
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model

CONTEXT, BLOCK_SIZE = 512, 16
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}

Row = dict[str, Any]


def row(model: str, what: str, num_rows: int, who: str, weights: float, took: timing.Timing) -> Row:
    return {
        "model": model,
        "what": what,
        "rows": num_rows,
        "kernel": who,
        **took.columns(),
        "TB/s": weights / took.median / 1e12,
    }


def linear_rows(name: str, num_rows: int, seconds: float) -> Iterator[Row]:
    shape = SHAPES[name]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    query, kv = (shape[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    for what, features, in_features in (
        ("qkv", query + 2 * kv, hidden),
        ("output", hidden, query),
        ("gate and up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("head", shape["vocab_size"], hidden),
    ):
        size = features * in_features * 2
        weights = [
            torch.randn(features, in_features, **OPTIONS) / in_features**0.5
            for _ in range(timing.rotations(size))
        ]
        input = torch.randn(num_rows, in_features, **OPTIONS)
        exact = input.double() @ weights[0].double().T
        kernels: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": torch.nn.functional.linear}
        if num_rows <= ops.MAX_SKINNY_ROWS:
            kernels["ours"] = ops.skinny_linear
        elif num_rows <= ops.MAX_DECODE_ROWS:
            kernels["ours"] = ops.decode_linear
        for who, kernel in kernels.items():
            error = (kernel(input, weights[0]).double() - exact).norm() / exact.norm()
            calls = [partial(kernel, input, weight) for weight in weights]
            took = timing.time_calls(calls, seconds=seconds)
            found = row(name, f"{what} {features} x {in_features}", num_rows, who, size, took)
            yield {**found, "error": float(error)}


class DecodeStep:
    """A step of `num_rows` requests that have CONTEXT tokens each."""

    def __init__(self, model: CausalLM, config: ModelConfig, num_rows: int) -> None:
        self.model = model
        blocks = CONTEXT // BLOCK_SIZE
        shape = (num_rows * blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.cache = torch.empty(shape, **OPTIONS).normal_()
        self.ids = torch.randint(0, config.vocab_size, (num_rows,), device="cuda")
        self.positions = torch.full((num_rows,), CONTEXT - 1, device="cuda")
        table = torch.randperm(num_rows * blocks, device="cuda").int().view(num_rows, blocks)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((num_rows,), CONTEXT, dtype=torch.int32, device="cuda")
        plan = ops.attention_plan(
            starts,
            lengths,
            num_tokens=num_rows,
            max_query_len=1,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
        )
        slots = table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
        self.batch = AttentionBatch(slots, table, starts, lengths, {0: plan}, newest_only=True)

    def run(self) -> Tensor:
        return self.model.compute_logits(self.model(self.ids, self.positions, self.cache, self.batch))


@torch.inference_mode()
def model_rows(
    name: str, model: CausalLM, config: ModelConfig, num_rows: int, seconds: float
) -> Iterator[Row]:
    step = DecodeStep(model, config, num_rows)
    tied = model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    embedding = 0 if tied else config.vocab_size * config.hidden_size
    weights = 2 * (sum(parameter.numel() for parameter in model.parameters()) - embedding)
    for who in ("torch", "ours"):
        with ExitStack() as changes:
            if who == "torch":
                changes.enter_context(mock.patch.object(few_rows, "have_kernels", return_value=False))
                changes.enter_context(mock.patch.object(decode_rows, "served", return_value=False))
            took = timing.time_calls([step.run], seconds=seconds)
        yield row(name, "model", num_rows, who, weights, took)


def new_model(name: str) -> tuple[CausalLM, ModelConfig]:
    with tempfile.TemporaryDirectory() as scratch:
        config = ModelConfig.from_pretrained(write_shape(name, Path(scratch)))
    model = build_model(config, torch.bfloat16, torch.device("cuda"), max_model_len=2 * CONTEXT)
    for parameter in model.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model, config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="comma-separated shapes")
    parser.add_argument("--rows", default="1,2,4", help="comma-separated")
    parser.add_argument("--parts", default="linear,model", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=0.1, help="about how long a row's replays take")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    timing.require_gpu()

    ceiling = timing.copy_ceiling()
    print(f"device-to-device copy: {ceiling / 1e12:.2f} TB/s")
    rows: list[Row] = []

    def take(found: Row) -> None:
        rows.append({**found, "ceiling": found["TB/s"] * 1e12 / ceiling})
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)

    counts = [int(count) for count in args.rows.split(",")]
    for name in args.models.split(","):
        if "linear" in args.parts:
            for count in counts:
                for found in linear_rows(name, count, args.seconds):
                    take(found)
        if "model" in args.parts:
            model, config = new_model(name)
            for count in counts:
                for found in model_rows(name, model, config, count, args.seconds):
                    take(found)
            del model
    timing.print_table(rows)
    if args.json:
        timing.write_json(args.json, timing.result_of("few_rows", rows, copy_ceiling=ceiling))


if __name__ == "__main__":
    main()
