"""top_logprobs against a stable sort and a softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF = math.inf


def assert_equals_oracle(
    logits: Tensor, token_ids: Tensor, num_top: int, device: torch.device, vocab_size: int | None = None
) -> None:
    out = ops.top_logprobs(logits.to(device), token_ids.to(device), num_top, vocab_size=vocab_size)
    logprobs, ranks, top_ids, top = reference.top_logprobs(logits, token_ids, num_top, vocab_size=vocab_size)
    assert out.ranks.tolist() == ranks.tolist()
    assert out.top_ids.tolist() == top_ids.tolist()
    close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(out.logprobs.cpu(), logprobs.float(), **close)
    torch.testing.assert_close(out.top_logprobs.cpu(), top.float(), **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 1024])
@pytest.mark.parametrize("vocab_size", [1, 5, 320, 1030, 9001, 49_152])
def test_equals_oracle(vocab_size: int, num_top: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    spread = torch.tensor([0.01, 1.0, 4.0, 30.0])[:, None]
    logits = (torch.randn(4, vocab_size, generator=generator) * spread).to(dtype)
    token_ids = torch.randint(vocab_size, (4,), generator=generator)
    token_ids[1] = logits[1].argmax()
    assert_equals_oracle(logits, token_ids, num_top, device)


@pytest.mark.parametrize("num_top", [3, 1000])
def test_ties_have_ranks_by_id(num_top: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 20_001, generator=generator).round()
    logits[2] = 0.0
    logits[3, ::2] = -0.0
    logits[3, 1::2] = 0.0
    token_ids = torch.randint(20_001, (6,), generator=generator)
    assert_equals_oracle(logits, token_ids, num_top, device)


def test_tokens_of_no_probability_are_ranked_too(device: torch.device) -> None:
    """One logit towers over the rest, by more than the weights reach."""
    logits = torch.linspace(-1e30, 0, 5000).repeat(4, 1)
    logits[0, 77] = 1e30
    logits[1, 77] = 100.0
    logits[2, 6:] = -INF
    logits[3] = -INF
    logits[3, [9, 4000]] = torch.tensor([3.0, 60.0])
    token_ids = torch.tensor([4990, 78, 4321, 9])
    assert_equals_oracle(logits, token_ids, 10, device)
    assert_equals_oracle(logits, token_ids, 1000, device)


def test_rows_that_are_skipped(device: torch.device) -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(2))
    logits[2, 50] = math.nan
    logits[3, 99] = INF
    logits[4] = -INF
    token_ids = torch.tensor([-1, 100, 4, 4, 4, 4])
    assert_equals_oracle(logits, token_ids, 4, device)
    out = ops.top_logprobs(logits.to(device), token_ids.to(device), 4)
    assert out.ranks[:5].tolist() == [0] * 5
    assert out.ranks[5] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_vocabulary_strides_and_addresses(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(24, 2100, generator=generator).to(dtype)
    token_ids = torch.randint(1900, (8,), generator=generator)
    for view in (whole[::3], whole[:8, 1:], whole[8:16, 3:2050]):
        assert_equals_oracle(view, token_ids, 7, device, vocab_size=1950)
    poisoned = whole[:8].clone()
    poisoned[:, 1950:] = math.nan
    assert_equals_oracle(poisoned, token_ids, 7, device, vocab_size=1950)
    on_device = whole.to(device)
    unaligned = ops.top_logprobs(on_device[:8, 1:], token_ids.to(device), 7)
    tight = ops.top_logprobs(on_device[:8, 1:].contiguous(), token_ids.to(device), 7)
    assert torch.equal(unaligned.top_ids, tight.top_ids)
    assert torch.equal(unaligned.logprobs, tight.logprobs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.randn(3, 40).double()}, "logits has dtype float64; expected float32, float16"),
        ({"logits": torch.randn(40)}, r"logits has shape \[40\]; expected \[num_rows, columns\]"),
        ({"logits": torch.randn(40, 3).t()}, r"logits has shape \[3, 40\] and strides \[1, 3\]"),
        ({"token_ids": torch.zeros(3).int()}, "token_ids has dtype int32; expected int64"),
        ({"token_ids": torch.zeros(4).long()}, r"token_ids has shape \[4\]; expected \[num_rows=3\]"),
        ({"num_top": -1}, "num_top is -1; expected 0 to 1024"),
        ({"num_top": 1025}, "num_top is 1025; expected at most 1024"),
        ({"vocab_size": 0}, "vocab_size is 0; expected 1 to 40"),
        ({"vocab_size": 41}, "vocab_size is 41; expected 1 to 40, the columns of logits"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str, device: torch.device) -> None:
    arguments: dict[str, Any] = {
        "logits": torch.randn(3, 40),
        "token_ids": torch.zeros(3, dtype=torch.int64),
        "num_top": 2,
    }
    arguments |= changes
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=f"top_logprobs: {message}"):
        ops.top_logprobs(**moved)


def test_opcheck(device: torch.device) -> None:
    logits = torch.randn(3, 40, device=device)
    torch.library.opcheck(
        torch.ops.pagedinfer.top_logprobs.default,
        (
            logits,
            torch.zeros(3, dtype=torch.int64, device=device),
            40,
            torch.zeros(3, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.zeros(3, 2, dtype=torch.int64, device=device),
            torch.zeros(3, 2, device=device),
        ),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_rows", [1, 9, 20, 80, 270])
def test_cpu_and_cuda_agree(num_rows: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, 128_256, generator=generator) * 3
    if masked:  # tokens of -inf have ranks too
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -INF
    token_ids = torch.randint(128_256, (num_rows,), generator=generator)
    on_cpu = ops.top_logprobs(logits, token_ids, 20)
    on_cuda = ops.top_logprobs(logits.cuda(), token_ids.cuda(), 20)
    assert on_cuda.ranks.tolist() == on_cpu.ranks.tolist()
    assert on_cuda.top_ids.tolist() == on_cpu.top_ids.tolist()
    torch.testing.assert_close(on_cuda.top_logprobs.cpu(), on_cpu.top_logprobs, atol=1e-5, rtol=0)
