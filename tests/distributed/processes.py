"""Which processes of an engine are still there."""

from __future__ import annotations

import time
from pathlib import Path

from pagedinfer import LLM
from pagedinfer.distributed.worker_group import WorkerGroup


def rank_pids(llm: LLM) -> list[int]:
    """The processes of an LLM's ranks."""
    workers = llm.llm_engine.worker
    assert isinstance(workers, WorkerGroup)
    return workers.pids


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it for its parent to see."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def all_end(pids: list[int], seconds: float) -> bool:
    """Whether all are gone within so long."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
