"""Engines that start on one GPU at the same time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from pagedinfer.runner import start_turn
from pagedinfer.runner.start_turn import _only_one, _open, turn_to_start
from tests.conftest import TinyModel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the locks are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_one_waits_for_the_other(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []

    def second() -> None:
        with _only_one("gpu"):
            events.append("second")

    with caplog.at_level(logging.INFO, "pagedinfer"), _only_one("gpu"):
        thread = threading.Thread(target=second)
        thread.start()
        with _only_one("another gpu"):
            events.append("another")
        thread.join(0.2)
        events.append("first")
    thread.join(10)
    assert events == ["another", "first", "second"]
    assert caplog.messages == ["another engine is starting on this GPU; waiting until it has"]


@pytest.mark.usefixtures("folder")
def test_a_start_that_fails_holds_nobody_up() -> None:
    with pytest.raises(RuntimeError), _only_one("gpu"):
        raise RuntimeError
    with _only_one("gpu"):
        pass


@pytest.mark.usefixtures("folder")
def test_a_forked_child_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def open_and_fork(path: Path) -> int | None:
        descriptor = _open(path)
        assert descriptor is not None
        copies.append(os.dup(descriptor))  # as a child has one
        return descriptor

    monkeypatch.setattr(start_turn, "_open", open_and_fork)
    with _only_one("gpu"):
        pass
    entered = threading.Event()

    def enter() -> None:
        with _only_one("gpu"):
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    assert entered.wait(10)
    for copy in copies:
        os.close(copy)


def test_no_folder_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with _only_one("gpu"):
        pass


@pytest.mark.usefixtures("folder")
def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some of clusters are; on NFS a descriptor to read from takes no exclusive one."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with _only_one("gpu"):
        pass


def test_users_share_the_file_whatever_their_umask(folder: Path) -> None:
    umask = os.umask(0o077)
    try:
        with _only_one("gpu"):
            pass
    finally:
        os.umask(umask)
    [file] = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_pipe_in_its_place_holds_nobody_up(folder: Path) -> None:
    os.mkfifo(folder / "pagedinfer-gpu.lock")
    descriptors: list[int | None] = []
    opening = threading.Thread(
        target=lambda: descriptors.append(_open(folder / "pagedinfer-gpu.lock")), daemon=True
    )
    opening.start()
    opening.join(10)
    assert not opening.is_alive()
    for descriptor in filter(None, descriptors):
        os.close(descriptor)


def test_a_cpu_has_no_turns(folder: Path) -> None:
    with turn_to_start(torch.device("cpu")), turn_to_start(torch.device("cpu")):
        assert list(folder.iterdir()) == []


@pytest.mark.gpu
def test_two_engines_on_one_gpu(tiny_llama: TinyModel) -> None:
    """Each gets what it asks for of what is free in its turn."""
    program = f"""
from pagedinfer import LLM
with LLM({tiny_llama.path!r}, device="cuda", gpu_memory_utilization=0.2) as llm:
    worker = llm.llm_engine.worker
    print(worker.num_blocks * worker.block_bytes / worker._meter.free)
    input()
"""
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    engines = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    shares = []
    for engine in engines:
        assert engine.stdout is not None
        shares.append(engine.stdout.readline())
    for engine in engines:
        engine.communicate("\n")
    assert all(0.1 < float(share) <= 0.2 for share in shares), shares
