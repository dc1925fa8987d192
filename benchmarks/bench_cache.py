"""Times the cache kernels: storing keys and values, copying blocks, swapping blocks with the host.

    python benchmarks/bench_cache.py                                  # everything, beside torch's operations
    python benchmarks/bench_cache.py --parts store,copy --vs torch,vllm
    python benchmarks/bench_cache.py --parts swap --json results/cache.json

32 query and 8 KV heads of 128, bfloat16, blocks of 16 tokens; up to 256 tokens are decodes, each in a block
of its own, more are a prompt, which fills blocks at random places one after the other. The bytes are those
that must be read and written, each counted once, but for a swap those that cross the link, in one direction
or in both; `ceiling` is their rate over that of a device-to-device copy in the same run or, for a swap, of
one large copy from pinned memory. The peers do the same with torch's operations, or with vLLM's kernel.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plots
import timing
from timing import bandwidth_row

from pagedinfer import ops

DEVICE = "cuda"
DTYPE = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
MAX_POSITION = 8192
MAX_DECODES = 256
MIB = 2**20

Row = dict[str, Any]


# ---- storing keys and values -------------------------------------------------------------------------


class Step:
    """The tensors of one step in one layer."""

    def __init__(self, tokens: int, table: Tensor) -> None:
        widths = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]
        qkv = torch.randn(tokens, sum(widths), dtype=DTYPE, device=DEVICE)
        self.query, self.key, self.value = (
            part.unflatten(1, (-1, HEAD_DIM)) for part in qkv.split(widths, dim=1)
        )
        is_prompt = tokens > MAX_DECODES
        num_blocks = 2 * (-(-tokens // BLOCK_SIZE) if is_prompt else tokens)
        shape = (num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.kv_cache = torch.empty(shape, dtype=DTYPE, device=DEVICE)
        blocks = torch.randperm(num_blocks, device=DEVICE)
        offsets = torch.arange(BLOCK_SIZE, device=DEVICE)
        if not is_prompt:
            offsets = torch.randint(0, BLOCK_SIZE, (num_blocks, 1), device=DEVICE)
        self.slots = (blocks[:, None] * BLOCK_SIZE + offsets).flatten()[:tokens].contiguous()
        self.positions = torch.randint(0, MAX_POSITION, (tokens,), device=DEVICE)
        self.table = table
        self.weight = torch.ones(HEAD_DIM, dtype=DTYPE, device=DEVICE)

    def store(self) -> None:
        ops.store_kv(self.key, self.value, self.kv_cache, self.slots)

    def store_in_torch(self) -> None:
        block, offset = self.slots // BLOCK_SIZE, self.slots % BLOCK_SIZE
        self.kv_cache[block, 0, :, offset] = self.key
        self.kv_cache[block, 1, :, offset] = self.value

    def rotate_then_store(self) -> None:
        ops.rotary_embedding(self.positions, self.query, self.key, self.table)
        ops.store_kv(self.key, self.value, self.kv_cache, self.slots)

    def rotate_and_store(self) -> None:
        ops.rotary_store_kv(
            self.positions, self.query, self.key, self.value, self.table, self.kv_cache, self.slots
        )

    def norm_rotate_and_store(self) -> None:
        ops.rotary_store_kv(
            self.positions,
            self.query,
            self.key,
            self.value,
            self.table,
            self.kv_cache,
            self.slots,
            query_norm_weight=self.weight,
            key_norm_weight=self.weight,
        )

    def store_in_vllm(self) -> Callable[[], None]:
        """Its cache lies as [num_blocks, block_size, num_kv_heads, head_dim]."""
        importlib.import_module("vllm._C")
        caches = [torch.empty_like(self.kv_cache[:, i].transpose(1, 2).contiguous()) for i in (0, 1)]
        one = torch.ones(1, device=DEVICE)
        store = torch.ops._C_cache_ops.reshape_and_cache_flash
        return lambda: store(self.key, self.value, *caches, self.slots, "auto", one, one)


def store_rows(peers: list[str], ceiling: float, seconds: float) -> list[Row]:
    angles = torch.rand(MAX_POSITION, HEAD_DIM // 2, device=DEVICE) * 7
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    rows = []
    for tokens in (1, 16, 256, 2048, 8192):
        kv_bytes = 4 * tokens * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
        query_bytes = 2 * tokens * NUM_HEADS * HEAD_DIM * DTYPE.itemsize
        steps = [Step(tokens, table) for _ in range(timing.rotations(kv_bytes + query_bytes))]
        both = kv_bytes + query_bytes
        variants: list[tuple[str, str, float, list[Callable[[], object]]]] = [
            ("store_kv", "ours", kv_bytes, [step.store for step in steps]),
            ("rotary + store_kv", "ours, one launch", both, [step.rotate_and_store for step in steps]),
            ("rotary + store_kv", "ours, two launches", both, [step.rotate_then_store for step in steps]),
            ("QK-norm + rotary + store_kv", "ours", both, [step.norm_rotate_and_store for step in steps]),
        ]
        if "torch" in peers:
            variants.append(("store_kv", "torch", kv_bytes, [step.store_in_torch for step in steps]))
        if "vllm" in peers:
            try:
                variants.append(("store_kv", "vllm", kv_bytes, [step.store_in_vllm() for step in steps]))
            except (ImportError, AttributeError) as error:
                print(f"no vllm: {error}", file=sys.stderr)
        rows += [
            bandwidth_row(
                name, f"{tokens} tokens", who, size, timing.time_calls(calls, seconds=seconds), ceiling
            )
            for name, who, size, calls in variants
        ]
    return rows


# ---- copying blocks ----------------------------------------------------------------------------------


def copy_rows(peers: list[str], ceiling: float, seconds: float) -> list[Row]:
    rows = []
    for count, block_bytes in (
        (1, 2 * MIB),
        (16, 2 * MIB),
        (256, 2 * MIB),
        (16, 64 * 1024),
        (256, 64 * 1024),
    ):
        num_blocks = 2 * count
        sets = timing.rotations(2 * count * block_bytes)
        caches = [
            torch.randint(0, 255, (num_blocks, block_bytes), dtype=torch.uint8, device=DEVICE)
            for _ in range(sets)
        ]
        order = random.Random(0).sample(range(num_blocks), num_blocks)
        mappings = {
            "apart": torch.tensor(list(zip(order[:count], order[count:], strict=True))),
            "a chain": torch.tensor(list(pairwise(order[: count + 1]))),
            "a cycle": torch.tensor(list(zip(order[:count], order[1:count] + order[:1], strict=True))),
        }
        for kind, mapping in mappings.items():
            if count == 1 and kind != "apart":
                continue
            calls: dict[str, list[Callable[[], object]]] = {
                "ours": [lambda cache=cache, m=mapping: ops.copy_blocks(cache, m) for cache in caches]
            }
            if "torch" in peers:
                source, destination = mapping.to(DEVICE).unbind(1)
                calls["torch"] = [
                    lambda cache=cache, s=source, d=destination: cache.index_copy_(0, d, cache[s])
                    for cache in caches
                ]
            rows += [
                bandwidth_row(
                    f"copy blocks of {block_bytes // 1024} KiB, {kind}",
                    f"{count} blocks",
                    who,
                    2 * count * block_bytes,
                    timing.time_calls(variants, seconds=seconds),
                    ceiling,
                )
                for who, variants in calls.items()
            ]
    return rows


# ---- swapping blocks ---------------------------------------------------------------------------------


def swap_rows(peers: list[str], seconds: float) -> list[Row]:
    rows = []
    for count, block_bytes in ((512, 2 * MIB), (4096, 64 * 1024)):
        shape = (2 * count, block_bytes)
        out_of, into = torch.randint(0, 255, (2, *shape), dtype=torch.uint8, device=DEVICE).unbind()
        to_host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        from_host = torch.randint(0, 255, shape, dtype=torch.uint8).pin_memory()
        size = count * block_bytes

        def timed(call: Callable[[], object]) -> timing.Timing:
            return timing.time_calls([call], seconds=seconds, graph=False)

        link = (
            size
            / timed(
                lambda into=into, host=from_host, n=count: into[:n].copy_(host[:n], non_blocking=True)
            ).median
        )
        order = random.Random(0).sample(range(2 * count), 2 * count)
        kinds = {
            "scattered": torch.tensor(list(zip(order[:count], order[count:], strict=True))),
            "neighbours": torch.arange(count).unsqueeze(1).repeat(1, 2),
        }
        for kind, mapping in kinds.items():
            name, blocks = f"swap blocks of {block_bytes // 1024} KiB, {kind}", f"{count} blocks"
            swap_out, swap_in = (
                partial(ops.swap_blocks, out_of, to_host, mapping),
                partial(ops.swap_blocks, from_host, into, mapping),
            )
            rows.append(bandwidth_row(f"{name}, out", blocks, "ours", size, timed(at_once(swap_out)), link))
            rows.append(bandwidth_row(f"{name}, in", blocks, "ours", size, timed(at_once(swap_in)), link))
            rows.append(
                bandwidth_row(
                    f"{name}, both ways", blocks, "ours", 2 * size, timed(at_once(swap_out, swap_in)), link
                )
            )
            if "torch" in peers and kind == "scattered":
                pairs = mapping.tolist()

                def one_by_one(
                    pairs: list[list[int]] = pairs, a: Tensor = out_of, b: Tensor = to_host
                ) -> None:
                    for source, destination in pairs:
                        b[destination].copy_(a[source], non_blocking=True)

                rows.append(bandwidth_row(f"{name}, out", blocks, "torch", size, timed(one_by_one), link))
    return rows


def at_once(*calls: Callable[[], object]) -> Callable[[], None]:
    """The calls side by side, each on a stream of its own, as the engine swaps; the current one waits."""
    streams = [torch.cuda.Stream() for _ in calls]

    def run() -> None:
        for call, stream in zip(calls, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="store,copy,swap", help="comma-separated")
    parser.add_argument("--vs", default="torch", help="peers, comma-separated: torch, vllm")
    parser.add_argument("--seconds", type=float, default=0.2, help="about how long a row's replays take")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--plot", type=Path, help="folder to draw the results into")
    args = parser.parse_args()
    timing.require_gpu()

    peers, parts = args.vs.split(","), args.parts.split(",")
    ceiling = timing.copy_ceiling()
    print(f"device-to-device copy: {ceiling / 1e12:.2f} TB/s")
    rows: list[Row] = []
    if "store" in parts:
        rows += store_rows(peers, ceiling, args.seconds)
    if "copy" in parts:
        rows += copy_rows(peers, ceiling, args.seconds)
    if "swap" in parts:
        rows += swap_rows(peers, args.seconds)
    timing.print_table(rows)
    result = timing.result_of("cache", rows, copy_ceiling=ceiling, peers=timing.peer_versions())
    if args.json:
        timing.write_json(args.json, result)
    if args.plot:
        plots.plot_result(result, args.plot)


if __name__ == "__main__":
    main()
