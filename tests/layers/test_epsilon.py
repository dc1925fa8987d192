"""Every op with a norm refuses an epsilon that would make NaNs of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedinfer import ops


def rows(*shape: int) -> Tensor:
    return torch.ones(shape)


def rotary_arguments() -> dict[str, Any]:
    """Of one token; heads of 64."""
    return {
        "positions": torch.zeros(1, dtype=torch.long),
        "query": rows(1, 2, 64),
        "key": rows(1, 1, 64),
        "value": rows(1, 1, 64),
        "cos_sin_cache": rows(1, 64),
        "kv_cache": rows(1, 2, 1, 16, 64),
        "slot_mapping": torch.zeros(1, dtype=torch.long),
    }


OPS: dict[str, Callable[[float], object]] = {
    "rms_norm": lambda epsilon: ops.rms_norm(rows(1, 8), rows(8), epsilon),
    "offset_rms_norm": lambda epsilon: ops.offset_rms_norm(rows(1, 8), rows(8), epsilon),
    "skinny_linear": lambda epsilon: ops.skinny_linear(
        rows(1, 8), rows(4, 8), norm_weight=rows(8), epsilon=epsilon
    ),
    "rotary_store_kv": lambda epsilon: ops.rotary_store_kv(
        **rotary_arguments(), query_norm_weight=rows(64), epsilon=epsilon
    ),
    "rotary_attention": lambda epsilon: ops.rotary_attention(
        **rotary_arguments(),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        query_norm_weight=rows(64),
        epsilon=epsilon,
        scale=1.0,
    ),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("epsilon", [math.nan, -1e-6, math.inf, 1e300])
def test_epsilon_is_finite_and_not_negative(op: str, epsilon: float) -> None:
    with pytest.raises(ValueError, match=rf"{op}: epsilon is .*; expected a finite float32 >= 0"):
        OPS[op](epsilon)


@pytest.mark.parametrize("op", OPS)
def test_epsilon_may_be_zero(op: str) -> None:
    OPS[op](0.0)
