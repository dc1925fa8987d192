"""Groups of two and of four processes, kept for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """The pool of so many ranks."""
    pools: dict[int, RankPool] = {}

    def of_size(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield of_size
    for pool in pools.values():
        pool.close()
