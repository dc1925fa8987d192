"""Times the layer kernels beside what else is installed.

    python benchmarks/bench_layers.py                        # ours and torch's operations
    python benchmarks/bench_layers.py --vs vllm,flashinfer --tokens 1,256,8192 --json results/layers.json

The bytes are those of inputs and outputs, each counted once; `ceiling` is their rate over that of a
device-to-device copy in the same run. `error` is against float64: ||out - exact|| / ||exact||. The peers:

    torch        the same in torch operations, one launch each
    vllm         vLLM's kernels (vllm._C)
    flashinfer   FlashInfer's kernels, compiled at first use
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plots
import timing

from pagedinfer import ops

DEVICE = "cuda"
EPSILON = 1e-5
MAX_POSITION = 8192

Kernel = Callable[..., Tensor]
"""Takes one set of buffers, returns what is compared with the exact result."""


@dataclass(frozen=True)
class Operation:
    """One row of the table, and who can do it."""

    kind: str
    """What it does."""
    size: str
    bytes: int
    """Read and written by one call."""
    buffers: Callable[[], tuple[Tensor, ...]]
    """A new set of arguments, at random."""
    exact: Kernel
    kernels: dict[str, Kernel]
    """By who offers them; "ours" is the first."""


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def rms_norm(tokens: int, hidden: int, dtype: torch.dtype, *, with_residual: bool) -> Operation:
    weight = randn(hidden, dtype=dtype)

    def buffers() -> tuple[Tensor, ...]:
        x, residual = randn(2, tokens, hidden, dtype=dtype).unbind()
        return x, residual, torch.empty_like(x)

    def exact(x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        total = x.double() + residual.double() if with_residual else x.double()
        total = total.to(dtype).double()
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON) * weight.double()

    def ours(x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, EPSILON, residual if with_residual else None, out)

    def in_torch(x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        if with_residual:
            residual += x
            x = residual
        return torch.nn.functional.rms_norm(x, (hidden,), weight, EPSILON)

    def vllm(x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        if with_residual:
            torch.ops._C.fused_add_rms_norm(x, residual, weight, EPSILON)
            return x
        torch.ops._C.rms_norm(out, x, weight, EPSILON)
        return out

    def flashinfer(x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        from flashinfer import norm

        if with_residual:
            norm.fused_add_rmsnorm(x, residual, weight, EPSILON)
            return x
        return norm.rmsnorm(x, weight, EPSILON, out=out)

    tensors = 4 if with_residual else 2
    return Operation(
        kind=f"rms_norm{' + residual' if with_residual else ''}",
        size=f"{tokens} x {hidden}",
        bytes=tensors * tokens * hidden * dtype.itemsize,
        buffers=buffers,
        exact=exact,
        kernels={"ours": ours, "torch": in_torch, "vllm": vllm, "flashinfer": flashinfer},
    )


def silu_and_mul(tokens: int, width: int, dtype: torch.dtype) -> Operation:
    def buffers() -> tuple[Tensor, ...]:
        return randn(tokens, 2 * width, dtype=dtype), torch.empty(tokens, width, dtype=dtype, device=DEVICE)

    def exact(x: Tensor, out: Tensor) -> Tensor:
        gate, up = x.double().chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up

    def in_torch(x: Tensor, out: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def vllm(x: Tensor, out: Tensor) -> Tensor:
        torch.ops._C.silu_and_mul(out, x)
        return out

    def flashinfer(x: Tensor, out: Tensor) -> Tensor:
        from flashinfer import activation

        return activation.silu_and_mul(x, out)

    return Operation(
        kind="silu_and_mul",
        size=f"{tokens} x {width}",
        bytes=3 * tokens * width * dtype.itemsize,
        buffers=buffers,
        exact=exact,
        kernels={"ours": ops.silu_and_mul, "torch": in_torch, "vllm": vllm, "flashinfer": flashinfer},
    )


def rotary_embedding(tokens: int, dtype: torch.dtype) -> Operation:
    """32 query and 8 key heads of 128, views of a fused QKV."""
    heads, kv_heads, head_dim = 32, 8, 128
    angles = torch.rand(MAX_POSITION, head_dim // 2, device=DEVICE) * 7
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    vllm_table = table.to(dtype)

    def buffers() -> tuple[Tensor, ...]:
        qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        query, key, _ = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        positions = torch.randint(0, MAX_POSITION, (tokens,), device=DEVICE)
        return positions, query.unflatten(1, (-1, head_dim)), key.unflatten(1, (-1, head_dim))

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def exact(positions: Tensor, query: Tensor, key: Tensor) -> Tensor:
        cos, sin = table.double()[positions].unsqueeze(1).chunk(2, dim=-1)
        return turned(query.double(), cos, sin)

    def ours(positions: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ops.rotary_embedding(positions, query, key, table)
        return query

    def in_torch(positions: Tensor, query: Tensor, key: Tensor) -> Tensor:
        cos, sin = vllm_table[positions].unsqueeze(1).chunk(2, dim=-1)
        query.copy_(turned(query, cos, sin))
        key.copy_(turned(key, cos, sin))
        return query

    def vllm(positions: Tensor, query: Tensor, key: Tensor) -> Tensor:
        flat_query, flat_key = query.flatten(1), key.flatten(1)
        torch.ops._C.rotary_embedding(positions, flat_query, flat_key, head_dim, vllm_table, True)
        return query

    return Operation(
        kind="rotary_embedding",
        size=f"{tokens} x (32 + 8) x 128",
        bytes=2 * tokens * (heads + kv_heads) * head_dim * dtype.itemsize,
        buffers=buffers,
        exact=exact,
        kernels={"ours": ours, "torch": in_torch, "vllm": vllm},
    )


def measured(operation: Operation, peers: list[str], ceiling: float, seconds: float) -> list[dict[str, Any]]:
    """The rows of one operation: ours and each peer's that can be run."""
    sets = [operation.buffers() for _ in range(timing.rotations(operation.bytes))]
    rows = []
    for who, kernel in operation.kernels.items():
        if who not in peers:
            continue
        arguments = operation.buffers()
        exact = operation.exact(*arguments)
        try:
            out = kernel(*arguments).double()
            took = timing.time_calls(
                [lambda kernel=kernel, buffers=buffers: kernel(*buffers) for buffers in sets], seconds=seconds
            )
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            print(
                f"{operation.kind} {operation.size}: no {who}: {str(error).splitlines()[0][:120]}",
                file=sys.stderr,
            )
            continue
        row = timing.bandwidth_row(operation.kind, operation.size, who, operation.bytes, took, ceiling)
        rows.append(row | {"error": float((out - exact).norm() / exact.norm())})
    return rows


def import_peers(names: list[str]) -> list[str]:
    """The kernels of vLLM register themselves as torch operators when they are imported."""
    if "vllm" in names:
        try:
            importlib.import_module("vllm._C")
        except ImportError as error:
            print(f"no vllm: {error}", file=sys.stderr)
            names = [name for name in names if name != "vllm"]
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,16,256,2048,8192", help="comma-separated")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--vs", default="torch", help="peers, comma-separated: torch, vllm, flashinfer")
    parser.add_argument("--seconds", type=float, default=0.2, help="about how long a row's replays take")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--plot", type=Path, help="folder to draw the results into")
    args = parser.parse_args()
    timing.require_gpu()

    dtype = getattr(torch, args.dtype)
    peers = ["ours", *import_peers(args.vs.split(","))]
    ceiling = timing.copy_ceiling()
    print(f"device-to-device copy: {ceiling / 1e12:.2f} TB/s")
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        for operation in (
            rms_norm(tokens, args.hidden, dtype, with_residual=True),
            rms_norm(tokens, args.hidden, dtype, with_residual=False),
            silu_and_mul(tokens, args.hidden, dtype),
            silu_and_mul(tokens, 7 * args.hidden // 2, dtype),
            rotary_embedding(tokens, dtype),
        ):
            rows += measured(operation, peers, ceiling, args.seconds)
    timing.print_table(rows)
    result = timing.result_of(
        "layers", rows, copy_ceiling=ceiling, dtype=args.dtype, peers=timing.peer_versions()
    )
    if args.json:
        timing.write_json(args.json, result)
    if args.plot:
        plots.plot_result(result, args.plot)


if __name__ == "__main__":
    main()
