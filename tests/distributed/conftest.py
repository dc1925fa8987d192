"""Groups of processes, kept for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., RankPool]]:
    """The pool of so many ranks, on "cpu" or "cuda"."""
    pools: dict[tuple[int, str], RankPool] = {}

    def of_size(size: int, device: str = "cpu") -> RankPool:
        if (size, device) not in pools:
            pools[size, device] = RankPool(size, device)
        return pools[size, device]

    yield of_size
    for pool in pools.values():
        pool.close()
