"""Times decodes whose sequences share a prefix, read once (cascade attention) and read for each of them.

    python benchmarks/bench_shared_prefix.py --rows 256x128+8192,256x128+2048,32x128+8192

`RxC+S`: R sequences of S shared tokens, in the same blocks, and C of their own. The op alone over a plan that
stands; block ids at random. `error` is the distance of the two outputs over the length of one.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import timing

from pagedinfer import ops


def row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", name)
    if found is None:
        raise SystemExit(f"--rows: {name!r} is not RxC+S")
    num_seqs, own, shared = map(int, found.groups())
    heads, kv_heads, head_dim, size = args.heads, args.kv_heads, args.head_dim, args.block_size
    own_blocks, shared_blocks = -(-own // size), shared // size
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    blocks = shared_blocks + num_seqs * own_blocks
    sets = timing.rotations(blocks * 2 * kv_heads * size * head_dim * 2, 8)
    kv_cache = torch.empty(blocks * sets, 2, kv_heads, size, head_dim, **options).normal_()
    ids = torch.randperm(blocks * sets, device="cuda").int().view(sets, blocks)
    tables = [
        torch.cat(
            [part[:shared_blocks].expand(num_seqs, -1), part[shared_blocks:].view(num_seqs, -1)], dim=1
        ).contiguous()
        for part in ids
    ]
    query = torch.randn(num_seqs, heads, head_dim, **options)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
    lens = torch.full((num_seqs,), shared + own, dtype=torch.int32, device="cuda")
    prefixes = ops.SharedPrefixes(
        torch.tensor([0, num_seqs] + [num_seqs] * 31, dtype=torch.int32, device="cuda"),
        torch.tensor([shared] + [0] * 31, dtype=torch.int32, device="cuda"),
    )
    result: dict[str, Any] = {"row": name}
    outputs = []
    for how, groups in (("once", prefixes), ("for each", None)):
        plan = ops.attention_plan(
            starts,
            lens,
            num_tokens=num_seqs,
            max_query_len=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=size,
            prefixes=groups,
        )
        out = torch.empty_like(query)
        calls = [
            lambda table=table, plan=plan, out=out: ops.paged_attention(
                query, kv_cache, table, starts, lens, plan, scale=head_dim**-0.5, out=out
            )
            for table in tables
        ]
        calls[0]()
        outputs.append(out.float().clone())
        took = timing.time_calls(calls, seconds=args.seconds)
        result |= {f"{how} us": took.median * 1e6, f"{how} 10 % to 90 %": (took.low * 1e6, took.high * 1e6)}
    result["times as fast"] = result["for each us"] / result["once us"]
    result["error"] = float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="256x128+8192,256x128+2048,64x128+2048,16x512+4096")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.2, help="of timed replays a row")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    timing.require_gpu()
    result = timing.result_of("shared_prefix", [], copy_ceiling=timing.copy_ceiling())
    for name in args.rows.split(","):
        result["rows"].append(row(name, args))
        print(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in result["rows"][-1].items()}, flush=True
        )
    if args.json:
        timing.write_json(args.json, result)


if __name__ == "__main__":
    main()
