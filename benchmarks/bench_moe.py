"""Times a mixture of experts, router included, beside what memory and tensor cores allow.

    python benchmarks/bench_moe.py      # a layer of Mixtral-8x7B's and one of Qwen3-30B-A3B's
    python benchmarks/bench_moe.py --tokens 1,64,4096 --vs vllm --json results/moe.json

`bound` is the larger of two times: reading the experts that the tokens were sent to at the rate of a copy on
the device, and computing at 800 TFLOP/s. The peer is vLLM's fused_experts, its router not included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import timing

from pagedinfer.layers.moe import Experts, MixtureOfExperts
from pagedinfer.layers.placement import Placement

FLOPS = 800e12
PLACEMENT = Placement(torch.bfloat16, torch.device("cuda"))


@dataclass(frozen=True, slots=True)
class Shape:
    num_experts: int
    k: int
    hidden: int
    inner: int


SHAPES = {"mixtral-8x7b": Shape(8, 2, 4096, 14336), "qwen3-30b-a3b": Shape(128, 8, 2048, 768)}


def make_layer(shape: Shape) -> MixtureOfExperts:
    experts = Experts(
        shape.num_experts,
        shape.hidden,
        shape.inner,
        activation="silu",
        names=("w1", "w3", "w2"),
        placement=PLACEMENT,
    )
    layer = MixtureOfExperts(experts, shape.hidden, k=shape.k, renormalize=True, placement=PLACEMENT)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return layer


def vllm_experts(layer: MixtureOfExperts, hidden: torch.Tensor) -> Callable[[], object]:
    from vllm.model_executor.layers.fused_moe import fused_experts

    weights, ids = layer.gate(hidden).softmax(-1, dtype=torch.float32).topk(layer.k)
    weights = weights / weights.sum(-1, keepdim=True)
    experts, ids = layer.experts, ids.int()
    return lambda: fused_experts(hidden, experts.gate_up, experts.down, weights, ids)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,8,32,128,512,4096,16384")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--vs", default="", help="vllm")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    timing.require_gpu()
    rate = timing.copy_ceiling()
    rows: list[dict[str, Any]] = []
    print(
        f"{'layer':14} {'tokens':>6} {'ours us':>9} {'bound us':>9} {'share':>6} {'vllm us':>9}", flush=True
    )
    for name in arguments.shapes.split(","):
        shape = SHAPES[name]
        layer = make_layer(shape)
        for tokens in map(int, arguments.tokens.split(",")):
            hidden = torch.randn((tokens, shape.hidden), device="cuda").bfloat16()
            used = layer.gate(hidden).topk(shape.k).indices.unique().numel()
            expert_bytes = 2 * 3 * shape.hidden * shape.inner
            bound = max(used * expert_bytes / rate, tokens * shape.k * expert_bytes / FLOPS)
            graph = not layer.experts.waits_for_the_device
            ours = timing.time_calls([partial(layer, hidden)], seconds=0.2, graph=graph).median
            row = {
                "layer": name,
                "tokens": tokens,
                "ours": ours,
                "bound": bound,
                "experts": used,
                "graph": graph,
            }
            if arguments.vs == "vllm":
                row["vllm"] = timing.time_calls([vllm_experts(layer, hidden)], seconds=0.2).median
            rows.append(row)
            theirs = f"{row['vllm'] * 1e6:9.1f}" if "vllm" in row else f"{'':9}"
            print(
                f"{name:14} {tokens:6} {ours * 1e6:9.1f} {bound * 1e6:9.1f} {bound / ours:6.2f} {theirs}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": timing.machine_info(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
