"""Ranks that are killed, stopped, stuck, or raise: the engine ends with a reason, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedinfer import LLM, EngineDeadError, SamplingParams
from tests.conftest import TinyModel
from tests.distributed.processes import all_end, rank_pids

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 8,
    "tensor_parallel_size": 2,
}
SECONDS = 10.0  # that the engine may take to notice


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(
            ["hello", "the quick brown fox"],
            SamplingParams(max_tokens=300, ignore_eos=True),
            use_tqdm=False,
        )


def break_and_wait(llm: LLM, break_it: Callable[[], None], delay: float) -> str:
    """Breaks something while the LLM generates; the error's message."""
    broken_at: list[float] = []

    def breaker() -> None:
        time.sleep(delay)
        broken_at.append(time.monotonic())
        break_it()

    pids = rank_pids(llm)
    thread = threading.Thread(target=breaker)
    thread.start()
    with pytest.raises(EngineDeadError) as caught:
        generate_for_ever(llm)
    ended_at = time.monotonic()
    thread.join()
    assert ended_at - broken_at[0] < SECONDS
    assert all_end(pids, 0.0)
    with pytest.raises(EngineDeadError):  # and again, rather than something odd
        llm.generate("hello", use_tqdm=False)
    started = time.monotonic()
    llm.close()
    assert time.monotonic() - started < 1.0
    return str(caught.value)


def check_a_kill(path: str, rank: int, delay: float, num_ranks: int = 2) -> None:
    llm = LLM(path, **OPTIONS | {"tensor_parallel_size": num_ranks})
    pid = rank_pids(llm)[rank]
    message = break_and_wait(llm, lambda: os.kill(pid, signal.SIGKILL), delay)
    assert f"rank {rank} (process {pid}) was killed by signal 9 (SIGKILL) in step " in message


def test_a_rank_is_killed(tiny_llama: TinyModel) -> None:
    check_a_kill(tiny_llama.path, 1, 0.2)


@pytest.mark.trial
@pytest.mark.parametrize("number", range(20))
def test_any_rank_is_killed_at_any_time(number: int, tiny_llama: TinyModel) -> None:
    check_a_kill(tiny_llama.path, number % 2, random.Random(number).uniform(0.0, 0.5))


@pytest.mark.trial
@pytest.mark.parametrize("number", range(8))
def test_any_of_four_ranks_is_killed_at_any_time(number: int, tiny_llama: TinyModel) -> None:
    check_a_kill(tiny_llama.path, number % 4, random.Random(number).uniform(0.0, 0.5), 4)


@pytest.mark.trial
@pytest.mark.parametrize("number", range(6))
def test_a_rank_is_killed_while_it_starts(number: int, tiny_llama: TinyModel) -> None:
    killed: list[int] = []

    def rank_processes() -> list[int]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return [int(pid) for pid in children if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def kill_the_first_child(delay: float) -> None:
        while len(pids := rank_processes()) < 2:  # a busy machine takes its time
            time.sleep(0.01)
        time.sleep(delay)
        killed.extend(pids)
        os.kill(pids[number % 2], signal.SIGKILL)

    thread = threading.Thread(target=kill_the_first_child, args=(0.3 * number,))
    thread.start()
    with pytest.raises(EngineDeadError, match=f"rank {number % 2} .*SIGKILL"):
        generate_for_ever(LLM(tiny_llama.path, **OPTIONS))
    thread.join()
    assert all_end(killed, 0.0)


def test_a_rank_is_stopped(tiny_llama: TinyModel) -> None:
    llm = LLM(tiny_llama.path, **OPTIONS)
    pid = rank_pids(llm)[0]
    message = break_and_wait(llm, lambda: os.kill(pid, signal.SIGSTOP), 0.1)
    assert f"rank 0 (process {pid}) has not answered for" in message


# A rank looks for this module when it starts, as every Python does. It makes rank 1 misbehave in step 20.
SITE = """
import sys, time
if "pagedinfer.distributed.rank_process" in sys.orig_argv:
    from pagedinfer.runner.worker import Worker
    execute = Worker.execute
    def broken(worker, batch):
        if worker._group.rank == 1 and batch.step >= 20:
            {statement}
        return execute(worker, batch)
    Worker.execute = broken
"""


@pytest.fixture
def break_rank_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def breaker(statement: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(SITE.format(statement=statement))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return breaker


def test_a_rank_raises(tiny_llama: TinyModel, break_rank_1: Callable[[str], None]) -> None:
    break_rank_1("raise RuntimeError('the reason')")
    message = break_and_wait(LLM(tiny_llama.path, **OPTIONS), lambda: None, 0.0)
    assert "rank 1" in message
    assert "failed in step 20 with RuntimeError: the reason" in message
    assert "Traceback (most recent call last)" in message
    assert "sitecustomize.py" in message


def test_a_rank_hangs(tiny_llama: TinyModel, break_rank_1: Callable[[str], None]) -> None:
    break_rank_1("time.sleep(1000)")
    message = break_and_wait(LLM(tiny_llama.path, **OPTIONS), lambda: None, 0.0)
    assert "rank 1" in message
    assert "hangs in step 20: no rank has got on for" in message
    assert "time.sleep(1000)" in message or "sitecustomize.py" in message
