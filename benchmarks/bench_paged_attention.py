"""Times paged_attention over grids of decode and prefill batches, beside what else is installed.

    python benchmarks/bench_paged_attention.py                          # both grids, ours alone
    python benchmarks/bench_paged_attention.py --vs naive,sdpa,fa3,flashinfer
    python benchmarks/bench_paged_attention.py --grid decode --rows 64x2048,1x1024 --deterministic

Each row is one batch with block ids drawn at random. The bytes are those of the keys and values, the
queries and the output, each counted once; the operations those of the causal half. `error` is that of a
sample of rows against float64: ||out - exact|| / ||exact||. The peers are those that can be imported:

    naive        gathers the blocks, expands the heads, matmul, softmax, matmul
    sdpa         torch's scaled_dot_product_attention over keys and values that lie contiguously already
    fa3          FlashAttention 3 (flash_attn_interface, or the copy in vLLM)
    flashinfer   FlashInfer's paged wrappers, tensor cores, planned outside the timed region; it compiles its
                 kernels at their first use, for minutes on a few cores and anew for each head_dim, and prints
                 nothing meanwhile. FLASHINFER_DISABLE_JIT=1 leaves out what is not compiled yet
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plots
import timing

from pagedinfer import ops

_ragged = random.Random(0)

DECODE: dict[str, list[tuple[int, int]]] = {
    "1x1024": [(1, 1024)],
    "1x32768": [(1, 32768)],
    "8x1024": [(1, 1024)] * 8,
    "8x4096": [(1, 4096)] * 8,
    "8x32768": [(1, 32768)] * 8,
    "16x4096": [(1, 4096)] * 16,
    "64x2048": [(1, 2048)] * 64,
    "256x512": [(1, 512)] * 256,
    "ragged32": [(1, _ragged.randint(1, 8192)) for _ in range(32)],
    "short200": [(1, _ragged.randint(100, 500)) for _ in range(200)],
}
"""Name -> (query tokens, sequence length) of each sequence."""

PREFILL: dict[str, list[tuple[int, int]]] = {
    "q512": [(512, 512)],
    "q2k": [(2048, 2048)],
    "q4k": [(4096, 4096)],
    "q8k": [(8192, 8192)],
    "q16k": [(16384, 16384)],
    "4xq2k": [(2048, 2048)] * 4,
    "16xq512": [(512, 512)] * 16,
    "chunk2k_of_8k": [(2048, 8192)],
    "2k+64d2k": [(2048, 2048)] + [(1, 2048)] * 64,
    "8d1k+2q2k": [(2048, 2048)] * 2 + [(1, 1024)] * 8,
}

NAIVE_LIMIT = 2**31
"""Elements of the score matrix above which the naive peer is left out."""


@dataclass
class Batch:
    """The tensors of a row; `tables` are block tables over disjoint blocks of one cache."""

    seqs: list[tuple[int, int]]
    query: Tensor  # [num_tokens, num_heads, head_dim]
    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    tables: list[Tensor]  # int32 [num_seqs, max_blocks]
    query_start_loc: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]
    scale: float

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[3]

    @property
    def max_query_len(self) -> int:
        return max(q for q, _ in self.seqs)

    def bytes(self) -> float:
        return bytes_of(self.seqs, self.query.shape[1], *self.kv_cache.shape[2::2], self.query.element_size())

    def operations(self) -> float:
        """Of the two products, over the keys that each query sees."""
        seen = sum(q * (n - q) + q * (q + 1) / 2 for q, n in self.seqs)
        return 4 * self.query.shape[1] * self.query.shape[2] * seen


def bytes_of(seqs: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, element: int) -> float:
    tokens, keys = sum(q for q, _ in seqs), sum(n for _, n in seqs)
    return (2 * keys * kv_heads + 2 * tokens * heads) * head_dim * element


def new_batch(seqs: list[tuple[int, int]], args: argparse.Namespace) -> Batch:
    element = torch.finfo(args.dtype).bits // 8
    size = bytes_of(seqs, args.heads, args.kv_heads, args.head_dim, element)
    sets = timing.rotations(size, args.rotations)
    blocks = [math.ceil(n / args.block_size) for _, n in seqs]
    total = sum(blocks) * sets
    options: dict[str, Any] = {"device": "cuda", "dtype": args.dtype}
    kv_cache = torch.empty(total + 1, 2, args.kv_heads, args.block_size, args.head_dim, **options).normal_()
    ids = (torch.randperm(total, device="cuda") + 1).int()
    tables, used = [], 0
    for _ in range(sets):
        table = torch.zeros(len(seqs), max(blocks), dtype=torch.int32, device="cuda")
        for i, count in enumerate(blocks):
            table[i, :count] = ids[used : used + count]
            used += count
        tables.append(table)
    starts = torch.tensor([0] + [q for q, _ in seqs]).cumsum(0).int().cuda()
    return Batch(
        seqs=seqs,
        query=torch.randn(sum(q for q, _ in seqs), args.heads, args.head_dim, **options),
        kv_cache=kv_cache,
        tables=tables,
        query_start_loc=starts,
        seq_lens=torch.tensor([n for _, n in seqs], dtype=torch.int32, device="cuda"),
        scale=args.head_dim**-0.5,
    )


def contiguous_kv(batch: Batch, table: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """Keys and values of sequence i: [num_kv_heads, seq_len, head_dim] each."""
    length = batch.seqs[i][1]
    ids = table[i, : math.ceil(length / batch.block_size)].long()
    k, v = batch.kv_cache[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return k, v


def error(batch: Batch, out: Tensor) -> float:
    """Of a sample: up to four sequences, up to eight of each one's queries."""
    step = max(1, len(batch.seqs) // 4)
    wrong = size = 0.0
    for i in range(0, len(batch.seqs), step):
        count, length = batch.seqs[i]
        start = int(batch.query_start_loc[i])
        k, v = (x.double() for x in contiguous_kv(batch, batch.tables[0], i))
        group = batch.query.shape[1] // k.shape[0]
        rows = sorted({round(j * (count - 1) / 7) for j in range(8)})
        for row in rows:
            seen = length - count + row + 1
            q = batch.query[start + row].double().view(k.shape[0], group, -1)
            weights = torch.softmax(q @ k[:, :seen].mT * batch.scale, -1)
            exact = (weights @ v[:, :seen]).flatten(0, 1)
            wrong += float((out[start + row].double() - exact).square().sum())
            size += float(exact.square().sum())
    return math.sqrt(wrong / size)


# ---- what is timed: each gives one call a block table, returning the output ---------------------------

Calls = list[Callable[[], Any]]


def ours(batch: Batch, args: argparse.Namespace, *, deterministic: bool = False) -> Calls:
    plan = ours_plan(batch, deterministic)
    out = torch.empty_like(batch.query)
    return [
        lambda table=table: ops.paged_attention(
            batch.query,
            batch.kv_cache,
            table,
            batch.query_start_loc,
            batch.seq_lens,
            plan,
            scale=batch.scale,
            out=out,
        )
        for table in batch.tables
    ]


def ours_plan(batch: Batch, deterministic: bool, out: ops.AttentionPlan | None = None) -> ops.AttentionPlan:
    return ops.attention_plan(
        batch.query_start_loc,
        batch.seq_lens,
        num_tokens=batch.query.shape[0],
        max_query_len=batch.max_query_len,
        num_heads=batch.query.shape[1],
        num_kv_heads=batch.kv_cache.shape[2],
        head_dim=batch.query.shape[2],
        block_size=batch.block_size,
        deterministic=deterministic,
        out=out,
    )


def naive(batch: Batch, args: argparse.Namespace) -> Calls:
    group = args.heads // args.kv_heads

    def call(table: Tensor) -> Tensor:
        out = torch.empty_like(batch.query)
        start = 0
        for i, (count, length) in enumerate(batch.seqs):
            k, v = (x.repeat_interleave(group, 0) for x in contiguous_kv(batch, table, i))
            q = batch.query[start : start + count].transpose(0, 1)
            scores = (q @ k.mT).float() * batch.scale
            if count > 1:
                mask = torch.ones(count, length, dtype=torch.bool, device="cuda").tril(length - count)
                scores = scores.masked_fill(~mask, -math.inf)
            out[start : start + count] = (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(0, 1)
            start += count
        return out

    if max(q * n for q, n in batch.seqs) * args.heads > NAIVE_LIMIT or len(batch.seqs) > 64:
        raise NotImplementedError("too large for the naive peer")
    return [lambda table=table: call(table) for table in batch.tables[:4]]


def sdpa(batch: Batch, args: argparse.Namespace) -> Calls:
    if len({*batch.seqs}) > 1 or batch.seqs[0][0] not in (1, batch.seqs[0][1]):
        raise NotImplementedError("sdpa: equal decodes or equal whole prompts only")
    count = batch.seqs[0][0]
    calls: Calls = []
    q = batch.query.view(len(batch.seqs), count, args.heads, -1).transpose(1, 2)
    for table in batch.tables:
        pairs = [contiguous_kv(batch, table, i) for i in range(len(batch.seqs))]
        k, v = (torch.stack(x) for x in zip(*pairs, strict=True))

        def call(k: Tensor = k, v: Tensor = v) -> Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=count > 1, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(0, 1)

        calls.append(call)
    return calls


def fa3(batch: Batch, args: argparse.Namespace) -> Calls:
    more: dict[str, Any] = {}
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        more = {"fa_version": 3}
    # Its cache: [num_blocks, block_size, num_kv_heads, head_dim].
    k, v = (batch.kv_cache[:, i].transpose(1, 2).contiguous() for i in (0, 1))
    longest = max(n for _, n in batch.seqs)
    return [
        lambda table=table: flash_attn_varlen_func(
            batch.query,
            k,
            v,
            batch.max_query_len,
            batch.query_start_loc,
            longest,
            seqused_k=batch.seq_lens,
            block_table=table,
            causal=True,
            **more,
        )
        for table in batch.tables
    ]


def flashinfer(batch: Batch, args: argparse.Namespace) -> Calls:
    import flashinfer

    k, v = (batch.kv_cache[:, i].transpose(1, 2).contiguous() for i in (0, 1))
    counts = [math.ceil(n / batch.block_size) for _, n in batch.seqs]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    last = torch.tensor([(n - 1) % batch.block_size + 1 for _, n in batch.seqs], dtype=torch.int32)
    heads = (args.heads, args.kv_heads, args.head_dim, batch.block_size)
    calls: Calls = []
    # Fewer sets of buffers, which are still larger together than the second-level cache: each wrapper has
    # 128 MiB of its own.
    for table in batch.tables[: max(4, math.ceil(timing.ROTATED_BYTES / 2 / batch.bytes()))]:
        ids = torch.cat([table[i, :count] for i, count in enumerate(counts)])
        buffer = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        if batch.max_query_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=True)
            wrapper.plan(
                starts.cuda(), ids, last.cuda(), *heads, q_data_type=args.dtype, kv_data_type=args.dtype
            )
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD")
            wrapper.plan(
                batch.query_start_loc.cpu(),
                starts,
                ids,
                last,
                *heads,
                causal=True,
                q_data_type=args.dtype,
                kv_data_type=args.dtype,
            )
        calls.append(lambda wrapper=wrapper: wrapper.run(batch.query, (k, v)))
    return calls


PEERS = {"naive": naive, "sdpa": sdpa, "fa3": fa3, "flashinfer": flashinfer}


# ---- the run -----------------------------------------------------------------------------------------


def measured(name: str, kernel: str, batch: Batch, calls: Calls, args: argparse.Namespace) -> dict[str, Any]:
    wrong = error(batch, calls[0]())
    took = timing.time_calls(calls, seconds=args.seconds)
    return {
        "batch": name,
        "kernel": kernel,
        "grid": "decode" if batch.max_query_len == 1 else "prefill",
        "num_seqs": len(batch.seqs),
        "tokens": batch.query.shape[0],
        "bytes": batch.bytes(),
        **took.columns(),
        "TB/s": batch.bytes() / took.median / 1e12,
        "TFLOP/s": batch.operations() / took.median / 1e12,
        "error": wrong,
    }


def rows_of(name: str, seqs: list[tuple[int, int]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    batch = new_batch(seqs, args)
    yield measured(name, "ours", batch, ours(batch, args), args)
    if args.deterministic:
        yield measured(name, "ours, deterministic", batch, ours(batch, args, deterministic=True), args)
    if args.plan:
        plan = ours_plan(batch, False)
        took = timing.time_calls([lambda: ours_plan(batch, False, out=plan)] * 8, seconds=args.seconds)
        yield {"batch": name, "kernel": "plan", **took.columns()}
    for peer in args.vs:
        try:
            yield measured(name, peer, batch, PEERS[peer](batch, args), args)
        except (ImportError, NotImplementedError, RuntimeError, ValueError) as problem:
            print(f"# {name}: {peer} left out: {str(problem).splitlines()[0][:150]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", choices=("decode", "prefill", "both"), default="both")
    parser.add_argument("--rows", default="", help="comma-separated names of rows; default: all")
    parser.add_argument("--vs", default="", help=f"comma-separated peers of {', '.join(PEERS)}")
    parser.add_argument(
        "--shapes",
        default="32/8/128/16",
        help="comma-separated: heads / KV heads / head_dim / tokens of a block; the first is drawn",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--deterministic", action="store_true", help="also time deterministic mode")
    parser.add_argument("--plan", action="store_true", help="also time the plan")
    parser.add_argument("--seconds", type=float, default=0.2, help="of timed replays a row")
    parser.add_argument("--rotations", type=int, default=32, help="at most so many sets of buffers")
    parser.add_argument("--json", type=Path, help="where to write the rows and the machine")
    parser.add_argument("--plot", type=Path, help="folder to draw the results into")
    args = parser.parse_args()
    timing.require_gpu()
    args.dtype = getattr(torch, args.dtype)
    shapes = [tuple(map(int, shape.split("/"))) for shape in args.shapes.split(",")]
    if any(len(shape) != 4 for shape in shapes):
        parser.error(f"--shapes is {args.shapes}; expected four numbers with slashes between for each shape")
    args.vs = [peer for peer in args.vs.split(",") if peer]
    if unknown := set(args.vs) - set(PEERS):
        parser.error(f"--vs names {sorted(unknown)}; known are {sorted(PEERS)}")
    grid = {"decode": DECODE, "prefill": PREFILL, "both": DECODE | PREFILL}[args.grid]
    wanted = [name for name in args.rows.split(",") if name] or list(grid)
    if unknown := set(wanted) - set(grid):
        parser.error(f"--rows names {sorted(unknown)}; known are {list(grid)}")

    ceiling = timing.copy_ceiling()
    print(f"device-to-device copy: {ceiling / 1e12:.2f} TB/s; peers: {timing.peer_versions()}")
    result = timing.result_of(
        "paged_attention",
        [],
        copy_ceiling=ceiling,
        peers=timing.peer_versions(),
        shape=args.shapes.split(",")[0],
    )
    rows = result["rows"]
    for shape in shapes:
        args.heads, args.kv_heads, args.head_dim, args.block_size = shape
        for name in wanted:
            for row in rows_of(name, grid[name], args):
                rows.append({"shape": "/".join(map(str, shape)), **row})
                print(
                    {k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True
                )
            torch.cuda.empty_cache()
            if args.json:
                timing.write_json(args.json, result)
    print(result["machine"])
    timing.print_table(
        [{k: v for k, v in row.items() if k not in ("grid", "num_seqs", "tokens", "bytes")} for row in rows]
    )
    if args.plot:
        plots.plot_result(result, args.plot)


if __name__ == "__main__":
    main()
