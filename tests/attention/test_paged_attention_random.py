"""Random ragged batches with random options."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedinfer import ops
from tests.attention.batches import DTYPES, make_batch

SEQUENCES = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 1500)),  # decode
        st.integers(1, 120).map(lambda n: (n, n)),  # a whole prompt
        st.tuples(st.integers(1, 90), st.integers(0, 700)).map(lambda c: (c[0], sum(c))),  # a chunk
        st.just((0, 0)),  # an unused row
    ),
    max_size=7,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=SEQUENCES,
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from(ops.HEAD_DIMS),
    block_size=st.sampled_from(ops.BLOCK_SIZES),
    dtype=st.sampled_from(DTYPES),
    window=st.one_of(st.just(0), st.integers(1, 800)),
    cap=st.sampled_from([0.0, 0.0, 5.0]),
    padding=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_random_batches(
    device: torch.device,
    sequences: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int,
    cap: float,
    padding: int,
    seed: int,
) -> None:
    make_batch(
        [query_len for query_len, _ in sequences],
        [seq_len for _, seq_len in sequences],
        device=device,
        dtype=dtype,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        sliding_window=window,
        logit_cap=cap,
        padding=padding,
        seed=seed,
    ).check()
