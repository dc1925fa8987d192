"""Times linear layers in a half type on a CPU: ours, torch's, and torch's in float32.

    python benchmarks/bench_half_linear.py
    python benchmarks/bench_half_linear.py --rows 1,16 --shapes 4096x4096,28672x4096 --dtype float16

Shapes are out_features x in_features; by default those of SmolLM2-135M. Each is timed over several weights in
turn, together larger than most caches, as the layers of a model are. The best of many rounds counts: others
may use the machine. GB/s are those of the weights, once each. `error` is against float64, as in bench_layers.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent))
import timing

from pagedinfer import ops

SMOLLM2 = "960x576,576x576,3072x576,576x1536,49152x576"
ELEMENTS = 60_000_000
"""What the weights of a row hold together: 120 MB in a half type."""

Linear = Callable[[Tensor, Tensor], Tensor]


def best_seconds(linear: Linear, input: Tensor, weights: list[Tensor], seconds: float) -> float:
    """Of one call, in the best round over the weights."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        for weight in weights:
            linear(input, weight)
        best = min(best, (time.perf_counter() - start) / len(weights))
    return best


def measured(rows: int, shape: tuple[int, int], dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """Of one shape: ours, torch's, and torch's in float32."""
    count = max(1, min(32, ELEMENTS // (shape[0] * shape[1])))
    input = torch.randn(rows, shape[1]).to(dtype)
    weights = [torch.randn(shape).to(dtype) for _ in range(count)]
    exact = input.double() @ weights[0].double().T
    wide = [weight.float() for weight in weights]
    kernels: dict[str, tuple[Linear, Tensor, list[Tensor]]] = {
        "ours": (ops.half_linear, input, weights),
        "torch": (functional.linear, input, weights),
        "torch fp32": (functional.linear, input.float(), wide),
    }
    found = []
    for name, (linear, x, matrices) in kernels.items():
        out = linear(x, matrices[0]).double()
        took = best_seconds(linear, x, matrices, seconds)
        found.append(
            {
                "rows": rows,
                "shape": f"{shape[0]} x {shape[1]}",
                "kernel": name,
                "us": took * 1e6,
                "GB/s": matrices[0].nbytes / took / 1e9,
                "GFLOP/s": 2e-9 * rows * shape[0] * shape[1] / took,
                "error": float((out - exact).norm() / exact.norm()),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,4,16,64,256", help="comma-separated")
    parser.add_argument("--shapes", default=SMOLLM2, help="OUTxIN, comma-separated")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each row takes at least")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    pays = "is" if ops.half_linear_pays(dtype) else "is not"
    print(f"{torch.get_num_threads()} threads; half_linear {pays} what layers use here")
    found = []
    for rows in map(int, args.rows.split(",")):
        for shape in args.shapes.split(","):
            columns, width = map(int, shape.split("x"))
            found += measured(rows, (columns, width), dtype, args.seconds)
    timing.print_table(found)
    if args.json:
        machine = {"cpu": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        result = {"benchmark": "half_linear", "machine": machine, "dtype": args.dtype, "rows": found}
        timing.write_json(args.json, result)


if __name__ == "__main__":
    main()
