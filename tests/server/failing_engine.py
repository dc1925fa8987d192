"""The engine's process with a real model; steps with a request of the seed 666 fail once four others wait."""

from __future__ import annotations

import sys
from typing import Any

from pagedinfer.engine.batch import Batch, StepHandle
from pagedinfer.server.engine_process import LocalEngine, serve

SEED = 666
NUM_WAITING = 4


def make_engine(config: dict[str, Any]) -> LocalEngine:
    """Whose worker raises after such a step has run."""
    engine = LocalEngine(config)
    worker, scheduler = engine._engine.worker, engine._engine.scheduler
    execute = worker.execute

    def failing(batch: Batch) -> StepHandle:
        handle = execute(batch)
        requests = [scheduler.requests[work.request_id] for work in batch.requests]
        if len(scheduler.waiting) == NUM_WAITING and any(r.sampling_params.seed == SEED for r in requests):
            raise RuntimeError("a step that fails")
        return handle

    worker.execute = failing  # type: ignore[assignment, method-assign]
    return engine


if __name__ == "__main__":
    sys.exit(serve(make_engine))
