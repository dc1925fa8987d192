"""The equivalence sweep on two and four ranks: the tokens of one rank, whatever the engine does.

The engine is in this process, and the ranks are those of the pool; `test_worker_group` has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedinfer.config import EngineConfig
from pagedinfer.engine import engine as engine_module
from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.models.model_config import ModelConfig
from tests.conftest import TinyModel
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_tasks import close_worker, execute, make_worker
from tests.engine.test_equivalence import (
    ENGINES,
    Result,
    check_same_tokens,
    expected,
    generate,
    order_of,
)

__all__ = ["expected"]

pytestmark = pytest.mark.usefixtures("one_thread")

IN_CUT = {
    (2, "default"),
    (2, "padded decodes"),
    (2, "recompute, chunks of 16"),
    (2, "swap, chunks of 16"),
    (2, "padded decodes, swap"),
    (2, "auto"),
    (4, "swap, no prefix cache"),
}
CASES = [
    pytest.param(num_ranks, name, marks=[] if (num_ranks, name) in IN_CUT else pytest.mark.trial)
    for num_ranks in (2, 4)
    for name in ("default", "another order", *ENGINES)
]


class PoolWorkers:
    """The workers of a pool's ranks, as one."""

    device = torch.device("cpu")
    dtype = torch.float32
    block_bytes: int
    cascade_attention = False
    urgent_lane = None

    def __init__(self, pool: RankPool, padded: bool, config: EngineConfig, num_known_tokens: int) -> None:
        self._pool = pool
        limits = pool.run(make_worker, config=config, num_known_tokens=num_known_tokens, padded=padded)
        assert all(each == limits[0] for each in limits)
        vars(self).update(limits[0])

    def execute(self, batch: Batch) -> PoolStep:
        return PoolStep(self._pool.run(execute, batch=batch))

    def take_swap_timings(self) -> list[tuple[int, float]]:
        return []

    def close(self) -> None:
        self._pool.run(close_worker)


class PoolStep:
    def __init__(self, outputs: list[StepOutput]) -> None:
        self._outputs = outputs

    def result(self) -> StepOutput:
        """Every rank must have drawn the same, since none tells another."""
        for output in self._outputs:
            assert output.token_ids.tolist() == self._outputs[0].token_ids.tolist()
        return self._outputs[0]


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_the_tokens_of_one_rank(
    num_ranks: int,
    name: str,
    tiny_llama: TinyModel,
    expected: Result,
    rank_pool: Callable[[int], RankPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(config: EngineConfig, model_config: ModelConfig, *, num_known_tokens: int) -> PoolWorkers:
        return PoolWorkers(rank_pool(num_ranks), "padded" in name, config, num_known_tokens)

    monkeypatch.setattr(engine_module, "WorkerGroup", make)
    changes: dict[str, Any] = ENGINES.get(name, {}) | {"tensor_parallel_size": num_ranks}
    found = generate(tiny_llama.path, order_of(name), **changes)
    check_same_tokens(found, expected)
    counters = found[2]
    recomputed, swapped = counters.num_preemptions_recompute, counters.num_preemptions_swap
    if "recompute" in name or "two blocks" in name:
        assert recomputed > 0
    elif "swap" in name:
        assert swapped > 0
    elif name == "auto":
        assert recomputed + swapped > 0
