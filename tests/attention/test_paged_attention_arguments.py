"""What paged_attention refuses, and how torch sees it."""

from __future__ import annotations

import pytest
import torch

from pagedinfer import ops
from tests.attention.batches import DTYPES, Batch, make_batch


@pytest.fixture
def batch(device: torch.device) -> Batch:
    return make_batch([1, 3], [20, 3], device=device)


def arguments(batch: Batch) -> tuple[object, ...]:
    """Those of the op itself."""
    plan = batch.plan()
    out = torch.zeros_like(batch.query)
    return (*batch.tensors, plan.plan, plan.workspace, out, plan.max_query_len, batch.scale, 0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch([1, 3], [20, 3], device=device, dtype=dtype)
    torch.library.opcheck(torch.ops.pagedinfer.paged_attention.default, arguments(batch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"query": lambda b: b.query[0]},
            r"query has shape \[4, 64\]; expected \[num_tokens, num_heads, head_dim\]",
        ),
        (
            {"kv_cache": lambda b: b.kv_cache[:, :1]},
            r"kv_cache has shape \[5, 1, 2, 16, 64\]; expected \[num_blocks, 2, ",
        ),
        ({"kv_cache": lambda b: b.kv_cache[..., :32].contiguous()}, r"kv_cache has shape .* head_dim=64\]"),
        ({"kv_cache": lambda b: b.kv_cache.half()}, "kv_cache has dtype float16; expected query's float32"),
        (
            {"query": lambda b: b.query.double()},
            "query has dtype float64; expected float32, float16 or bfloat16",
        ),
        ({"block_table": lambda b: b.block_table.long()}, "block_table has dtype int64; expected int32"),
        ({"block_table": lambda b: b.block_table[0]}, "block_table has shape"),
        ({"seq_lens": lambda b: b.seq_lens[:1]}, r"seq_lens has shape \[1\]; expected \[num_seqs=2\]"),
        ({"seq_lens": lambda b: b.seq_lens.long()}, "seq_lens has dtype int64; expected int32"),
        (
            {"query_start_loc": lambda b: b.query_start_loc[:2]},
            r"query_start_loc has shape \[2\]; expected .*3\]",
        ),
        (
            {"query_start_loc": lambda b: b.query_start_loc.long()},
            "query_start_loc has dtype int64; expected int32",
        ),
        ({"scale": lambda b: float("nan")}, "scale is nan; expected a finite number"),
        ({"sliding_window": lambda b: -1}, "sliding_window is -1; expected >= 0"),
        ({"logit_cap": lambda b: -2.0}, "logit_cap is -2; expected a finite number >= 0"),
        ({"logit_cap": lambda b: float("inf")}, "logit_cap is inf; expected a finite number >= 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_argument_errors(batch: Batch, change: dict, message: str) -> None:
    plan = batch.plan()
    changed = batch.with_options(**{name: make(batch) for name, make in change.items()})
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        changed.run(plan)


@pytest.mark.parametrize("head_dim", [8, 32, 72, 160, 192, 512])
def test_unsupported_head_dim(device: torch.device, head_dim: int) -> None:
    batch = make_batch([1], [4], device=device, head_dim=head_dim)
    message = f"head_dim is {head_dim}; supported are 64, 80, 96, 112, 128, 256"
    with pytest.raises(ValueError, match=f"attention_plan_sizes: {message}"):
        batch.plan()
    plan = make_batch([1], [4], device=device).plan()
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        batch.run(plan)


@pytest.mark.parametrize("block_size", [1, 4, 24, 128])
def test_unsupported_block_size(device: torch.device, block_size: int) -> None:
    batch = make_batch([1], [4], device=device, block_size=block_size)
    with pytest.raises(ValueError, match=f"block_size is {block_size}; supported are 8, 16, 32, 64"):
        batch.plan()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 2), (2, 4), (7, 3)])
def test_heads_that_do_not_divide(device: torch.device, num_heads: int, num_kv_heads: int) -> None:
    batch = make_batch([1], [4], device=device, num_heads=num_heads, num_kv_heads=num_kv_heads)
    with pytest.raises(
        ValueError, match=f"num_heads is {num_heads} and num_kv_heads {num_kv_heads}; expected"
    ):
        batch.plan()


@pytest.mark.parametrize("name", ["plan", "workspace"])
def test_buffers_that_are_too_short(batch: Batch, name: str) -> None:
    plan = batch.plan()
    full = {"plan": plan.plan, "workspace": plan.workspace, "max_query_len": plan.max_query_len}
    if full[name].numel() == 0:
        pytest.skip("this batch needs none")
    short = ops.AttentionPlan(**{**full, name: full[name][:-1]})
    with pytest.raises(ValueError, match=f"{name} has {full[name].numel() - 1} elements; expected at least"):
        batch.run(short)


def test_output_that_does_not_fit(batch: Batch) -> None:
    for out, message in (
        (batch.query[:2].clone(), r"out has shape \[2, 4, 64\]; expected \[num_tokens=4, "),
        (batch.query.half(), "out has dtype float16; expected query's float32"),
        (torch.empty(4, 64, 4, device=batch.query.device).transpose(1, 2), "out has .* expected contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(*batch.tensors, batch.plan(), scale=1.0, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kv_cache", "block_table", "query_start_loc", "seq_lens"])
def test_tensors_on_two_devices(name: str) -> None:
    batch = make_batch([1], [4], device=torch.device("cuda"))
    changed = batch.with_options(**{name: getattr(batch, name).cpu()})
    with pytest.raises(ValueError, match=f"{name} is on cpu; expected cuda:0, where query is"):
        changed.run(batch.plan())


# ---- contents, which only the CPU looks at -----------------------------------------------------------


@pytest.mark.parametrize("block_id", [-1, 5, 2**31 - 1])
def test_block_id_out_of_range(block_id: int) -> None:
    batch = make_batch([1, 3], [20, 3], device=torch.device("cpu"))
    batch.block_table[0, 1] = block_id
    message = rf"block_table\[0, 1\] is {block_id}; expected a block id below num_blocks=5"
    with pytest.raises(ValueError, match=message):
        batch.run()


def test_sequence_longer_than_its_block_table() -> None:
    batch = make_batch([1, 3], [20, 3], device=torch.device("cpu"))
    batch.seq_lens[0] = 49
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 49; expected at most 48"):
        batch.run()


def test_plan_of_another_batch() -> None:
    """On a GPU a plan that is out of date gives wrong results; here it is an error."""
    batch = make_batch([1, 3], [20, 7], device=torch.device("cpu"))
    plan = batch.plan()
    batch.run(plan)
    batch.seq_lens[0] += 1
    with pytest.raises(ValueError, match="plan was made for another batch"):
        batch.run(plan)
    batch.seq_lens[0] -= 1
    with pytest.raises(ValueError, match=r"plan was made for another batch.*sliding_window=5"):
        batch.with_options(sliding_window=5).run(plan)
    batch.run(plan)
