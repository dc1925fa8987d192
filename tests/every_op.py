"""Runs every op once on small inputs: what compute-sanitizer watches, since it slows a GPU down a lot.

compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.every_op [op ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from pagedinfer import ops

Call = Callable[[torch.device], None]

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16


def registered_ops() -> set[str]:
    """The names of all ops in the kernel library."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("pagedinfer::") for name in names if name.startswith("pagedinfer::")}


def attention(device: torch.device) -> None:
    """At head sizes that take the GPU's kernels other ways: three blocks a multiprocessor, two, and pairs of
    warps that share a head."""
    for head_dim in (64, 128, 256):
        attention_of(device, head_dim)
        attention_of_many(device, head_dim)


def attention_of(device: torch.device, head_dim: int) -> None:
    """Decode rows, prefill chunks and an unused row in one batch; a row long enough to be split."""
    query_lens, seq_lens = [1, 1, 37, 0, 1, 130], [1, 17, 50, 0, 700, 130]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in seq_lens)
    block_table = torch.zeros(len(seq_lens), 44, dtype=torch.int32)
    blocks = iter(torch.randperm(num_blocks).tolist())
    for row, length in enumerate(seq_lens):
        for i in range(-(-length // BLOCK_SIZE)):
            block_table[row, i] = next(blocks)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(sum(query_lens) + 2, NUM_HEADS, head_dim, device=device).to(dtype)
        cache = torch.randn(num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, device=device).to(dtype)
        for rows in (slice(None), slice(0, 2)):  # any mix, and decode alone
            plan = ops.attention_plan(
                starts[: len(lens[rows]) + 1],
                lens[rows],
                num_tokens=len(query),
                max_query_len=max(query_lens[rows]),
                num_heads=NUM_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=head_dim,
                block_size=BLOCK_SIZE,
            )
            ops.paged_attention(
                query,
                cache,
                block_table.to(device)[rows],
                starts[: len(lens[rows]) + 1],
                lens[rows],
                plan,
                scale=head_dim**-0.5,
                logit_cap=30.0,
            )


def attention_of_many(device: torch.device, head_dim: int) -> None:
    """So many short rows that the blocks of a large GPU are dealt whole units, and all warps plan."""
    seq_lens = torch.full((2500,), 7, dtype=torch.int32, device=device)
    seq_lens[::20] = 100
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=device)
    block_table = torch.arange(7, dtype=torch.int32, device=device).expand(len(seq_lens), 7).contiguous()
    sizes = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": head_dim}
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(len(seq_lens), NUM_HEADS, head_dim, device=device).to(dtype)
        cache = torch.randn(7, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, device=device).to(dtype)
        plan = ops.attention_plan(
            starts, seq_lens, num_tokens=len(query), max_query_len=1, block_size=BLOCK_SIZE, **sizes
        )
        ops.paged_attention(query, cache, block_table, starts, seq_lens, plan, scale=head_dim**-0.5)


MANY_TOKENS = 1025
"""Of which the GPU takes another way, and one is left over of pairs."""


def fused_qkv(device: torch.device, dtype: torch.dtype, num_tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, as split views."""
    widths = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]
    qkv = torch.randn(num_tokens, sum(widths), device=device).to(dtype)
    query, key, value = (part.unflatten(1, (-1, HEAD_DIM)) for part in qkv.split(widths, dim=1))
    return query, key, value


def one_layer(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A layer's view of a cache of 3 blocks and 2 layers; the last slot is its memory's end."""
    return torch.zeros(3, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device=device, dtype=dtype)[:, 1]


def last_slots(device: torch.device, num_tokens: int = 5) -> Tensor:
    """For five tokens; padding for those before."""
    slots = torch.full((num_tokens,), -1, device=device)
    slots[-5:] = torch.tensor([47, -1, 0, 16, 46], device=device)
    return slots


def cos_sin_table(device: torch.device) -> Tensor:
    """Of 5 positions; the last is its memory's end."""
    return torch.randn(5, HEAD_DIM, device=device)


def store_kv(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens in (5, MANY_TOKENS):
            _, key, value = fused_qkv(device, dtype, num_tokens)
            ops.store_kv(key, value, one_layer(device, dtype), last_slots(device, num_tokens))


def rotary_store_kv(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens, interleaved in ((5, False), (5, True), (MANY_TOKENS, False)):
            for weight in (None, torch.ones(HEAD_DIM, device=device, dtype=dtype)):
                ops.rotary_store_kv(
                    torch.arange(num_tokens, device=device) % 5,
                    *fused_qkv(device, dtype, num_tokens),
                    cos_sin_table(device),
                    one_layer(device, dtype),
                    last_slots(device, num_tokens),
                    interleaved=interleaved,
                    query_norm_weight=weight,
                    key_norm_weight=weight,
                )


def rotary_attention(device: torch.device) -> None:
    """Lengths of none, of one token and of more than a cluster takes in a turn; norms, window, cap."""
    lens = torch.tensor([1, 0, 1100], dtype=torch.int32, device=device)
    table = torch.zeros(3, 69, dtype=torch.int32, device=device)
    table[2] = torch.arange(1, 70)
    slots = torch.tensor([0, -1, 69 * BLOCK_SIZE + 1099 % BLOCK_SIZE], device=device)
    for dtype in (torch.float16, torch.bfloat16):
        cache = torch.zeros(70, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device=device, dtype=dtype)
        query, key, value = (part[:3] for part in fused_qkv(device, dtype))
        norm = torch.ones(HEAD_DIM, device=device, dtype=dtype)
        for weight, window in ((None, 0), (norm, 40)):
            ops.rotary_attention(
                torch.tensor([0, 0, 4], device=device),
                query,
                key,
                value,
                cos_sin_table(device),
                cache,
                slots,
                table,
                lens,
                scale=0.1,
                sliding_window=window,
                logit_cap=5.0,
                query_norm_weight=weight,
                key_norm_weight=weight,
            )


def copy_blocks(device: torch.device) -> None:
    mapping = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 4], [3, 5]])
    for width in (1, 24, 3000):
        ops.copy_blocks(torch.zeros(6, width, dtype=torch.uint8, device=device), mapping)


def swap_blocks(device: torch.device) -> None:
    on_device = torch.zeros(40, 24, device=device)
    on_host = torch.zeros(80, 24, pin_memory=device.type == "cuda")
    scattered = torch.tensor([[i, 2 * i] for i in range(40)])
    ops.swap_blocks(on_device, on_host, scattered)
    ops.swap_blocks(on_host, on_device, scattered.flip(1))


def sample_tokens(device: torch.device) -> None:
    for dtype, columns in ((torch.float32, 5003), (torch.bfloat16, 40_000)):
        logits = torch.randn(3, columns, device=device).to(dtype)
        ops.sample_tokens(
            logits,
            torch.tensor([1, -1, 0], dtype=torch.int32, device=device),
            temperature=torch.tensor([0.0, 0.8], device=device),
            top_k=torch.tensor([0, 50], dtype=torch.int32, device=device),
            top_p=torch.tensor([1.0, 0.9], device=device),
            min_p=torch.tensor([0.0, 0.05], device=device),
            seeds=torch.tensor([1, 2], device=device),
            positions=torch.tensor([0, 3], device=device),
            logprobs=torch.empty(3, device=device),
        )


def top_logprobs(device: torch.device) -> None:
    for dtype, columns in ((torch.float32, 5003), (torch.bfloat16, 40_000)):
        logits = torch.randn(3, columns, device=device).to(dtype)
        ops.top_logprobs(logits, torch.tensor([0, -1, columns - 1], device=device), 5)


def rms_norm(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for hidden in (24, 1000, 4096, 40_000):
            input, residual = torch.randn(2, 3, hidden, device=device).to(dtype).unbind()
            weight = torch.ones(hidden, device=device, dtype=dtype)
            ops.rms_norm(input, weight, 1e-5)
            ops.rms_norm(input, weight, 1e-5, residual)


def offset_rms_norm(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for hidden in (24, 250, 4096, 40_000):
            input, addend = torch.randn(2, 3, hidden, device=device).to(dtype).unbind()
            ops.offset_rms_norm(input, torch.ones(hidden, device=device, dtype=dtype), 1e-5, addend)


def rotary_embedding(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for interleaved in (False, True):
            query, key, _ = fused_qkv(device, dtype)
            positions = torch.arange(5, device=device)
            ops.rotary_embedding(positions, query, key, cos_sin_table(device), interleaved=interleaved)


def silu_and_mul(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for width in (3, 1000, 4096):
            ops.silu_and_mul(torch.randn(3, 2 * width, device=device).to(dtype))


def skinny_linear(device: torch.device) -> None:
    """With each part and without; rows of a few vectors and of several chunks."""
    for dtype in (torch.float32, torch.bfloat16):
        for rows, features, in_features in ((1, 10, 8), (3, 40, 1096)):
            input = torch.randn(rows, in_features, device=device).to(dtype)
            weight = torch.randn(features, in_features, device=device).to(dtype)
            stream = ops.skinny_linear(input, weight, weight[:, 0].contiguous())
            ops.skinny_linear(input, weight, norm_weight=weight[0], residual=stream, out=stream)
            ops.skinny_linear(input, weight, gated=True)


def decode_linear(device: torch.device) -> None:
    """Tiles in part, and the inner dimension in parts; on GPUs that it is for."""
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return
    for dtype in (torch.float16, torch.bfloat16):
        for rows, out_features, in_features in ((9, 70, 72), (100, 208, 2056), (128, 18000, 136)):
            weight = torch.randn(out_features, in_features, device=device).to(dtype)
            input = torch.randn(rows, in_features, device=device).to(dtype)
            ops.decode_linear(input, weight, weight[:, 0].contiguous())
            ops.decode_linear(input, weight[: out_features // 16 * 16], gated=True)


def half_linear(device: torch.device) -> None:
    """There is none for GPUs: on the CPU whatever the device."""
    for dtype in (torch.float16, torch.bfloat16):
        ops.half_linear_pays(dtype)
        for num_rows, out_features, in_features in ((1, 50, 33), (11, 7, 700)):
            weight = torch.randn(out_features, in_features).to(dtype)
            ops.half_linear(torch.randn(num_rows, in_features).to(dtype), weight, weight[:, 0].contiguous())


def decode_inputs(device: torch.device) -> None:
    """Rows of one block and of many, new blocks and padding; what is drawn goes back."""
    packed = torch.tensor([[2, 0, -1], [16 * 300, 1, 0], [7, -1, -1]], dtype=torch.int32, device=device)
    by_slot = torch.zeros(3, 3, dtype=torch.int64, device=device)
    ops.decode_inputs(
        packed,
        last_tokens=by_slot[0],
        num_prompt_tokens=by_slot[1],
        block_table=torch.zeros(3, 300, dtype=torch.int32, device=device),
        output_positions=by_slot[2],
        block_size=16,
    )
    ops.keep_tokens(packed[0], torch.tensor([5, -1, 3], device=device), by_slot[0])


def step_ring(device: torch.device) -> None:
    """Full places, up to the memory's end."""
    ring = torch.zeros(2, 1500, dtype=torch.int32, pin_memory=device.type == "cuda")
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(3):
        given = torch.zeros(1500, dtype=torch.int32, device=device)
        ops.read_ring(ring, turn, given)
        ops.write_ring(given, turn, ring)


def hold_while(device: torch.device) -> None:
    """Nothing to wait for, and something that nobody ends."""
    for value in (0, 1):
        ops.hold_while(torch.full((1,), value, dtype=torch.int32, device=device), 50)


def peer_all_reduce(device: torch.device) -> None:
    """One rank, which waits for nobody: what several do needs several."""
    memory = torch.zeros(ops.peer_memory_bytes(1 << 16), dtype=torch.uint8, device=device)
    memories = torch.tensor([memory.data_ptr()])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for size in (8, 4096, 10_000):
            ops.peer_all_reduce(torch.randn(size, device=device).to(dtype), memories, 0, 1 << 16)
        for num_rows, hidden in ((1, 64), (5, 640), (70, 8)):
            data, residual = torch.randn(2, num_rows, hidden, device=device).to(dtype)
            weight = torch.ones(hidden, device=device).to(dtype)
            ops.peer_all_reduce_norm(data, residual, weight, 1e-5, memories, 0, 1 << 16)


def experts(device: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.float16, torch.bfloat16)
    for dtype in dtypes:
        for num_tokens, block_rows in ((3, 16), (100, 64)):
            hidden = torch.randn(num_tokens, 72, device=device).to(dtype)
            scores = torch.randn(num_tokens, 5, device=device).to(dtype)
            routing = ops.route_experts(scores, 2, renormalize=True, block_rows=block_rows)
            gate_up = torch.randn(5, 80, 72, device=device).to(dtype)
            ops.expert_mlp(hidden, gate_up, torch.randn(5, 72, 40, device=device).to(dtype), routing)


CALLS: dict[str, Call] = {
    "attention_plan_sizes": attention,
    "attention_plan": attention,
    "paged_attention": attention,
    "store_kv": store_kv,
    "rotary_attention": rotary_attention,
    "rotary_store_kv": rotary_store_kv,
    "copy_blocks": copy_blocks,
    "swap_blocks": swap_blocks,
    "sample_tokens_workspace_size": sample_tokens,
    "sample_tokens": sample_tokens,
    "top_logprobs": top_logprobs,
    "rms_norm": rms_norm,
    "offset_rms_norm": offset_rms_norm,
    "rotary_embedding": rotary_embedding,
    "silu_and_mul": silu_and_mul,
    "skinny_linear": skinny_linear,
    "decode_linear_workspace_size": decode_linear,
    "decode_linear": decode_linear,
    "half_linear_pays": half_linear,
    "half_linear": half_linear,
    "decode_inputs": decode_inputs,
    "keep_tokens": decode_inputs,
    "read_ring": step_ring,
    "write_ring": step_ring,
    "hold_while": hold_while,
    "peer_all_reduce": peer_all_reduce,
    "peer_all_reduce_norm": peer_all_reduce,
    "route_experts": experts,
    "expert_gate_up": experts,
    "expert_down": experts,
    "sum_experts": experts,
}


def main() -> None:
    """Runs the ops named on the command line, or all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = sys.argv[1:] or sorted(CALLS)
    for call in dict.fromkeys(CALLS[name] for name in names):
        call(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{call.__name__}: ran on {device}")


if __name__ == "__main__":
    main()
