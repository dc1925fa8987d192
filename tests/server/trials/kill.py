"""kill -9 of the engine or of the API process at random moments: nothing is left, and the errors are clear.

python -m tests.server.trials.kill [--times 50]
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.server.rig import Server, wait_gone
from tests.tiny_models import make_llama


def leftovers() -> set[str]:
    """Shared memory and folders of sockets."""
    places = (tempfile.gettempdir(), "/dev/shm")
    return {str(path) for place in places for path in Path(place).glob("*pagedinfer*")}


def trial(model: str, seed: int, *, scripted: bool = True) -> str:
    """One kill; what was killed, and when. Raises AssertionError if anything is wrong after."""
    rng = random.Random(seed)
    victim = rng.choice(["engine", "api"])
    loading = rng.random() < 0.2
    before = leftovers()
    outcomes: list[str] = []
    with Server(model, scripted=scripted, wait=not loading) as server:
        server.wait_listening()
        engine = _engine_pid(server)
        clients = []
        if not loading:
            clients = [threading.Thread(target=_ask, args=(server, i, outcomes)) for i in range(8)]
            for client in clients:
                client.start()
        time.sleep(rng.uniform(0.0, 0.6))
        if victim == "engine":
            os.kill(engine, signal.SIGKILL)
            assert server.process.wait(20) == 1, "the API process must end with exit code 1"
        else:
            server.process.kill()
            server.process.wait()
        for client in clients:
            client.join(10)
            assert not client.is_alive(), "a client still waits"
        wait_gone({engine}, 10)
    if victim == "engine" and not loading:
        assert "has ended unexpectedly" in server.log, server.log
    deadline = time.monotonic() + 5
    while leftovers() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leftovers() - before, leftovers() - before
    allowed = {"answer", "error 500", "error event", "connection", "error 503"}
    assert set(outcomes) <= allowed, outcomes
    assert len(outcomes) == len(clients)
    return f"{victim} {'while loading' if loading else 'while serving'}"


def _engine_pid(server: Server) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            return server.engine_pid()
        except ValueError:  # it is not there yet
            time.sleep(0.01)
    raise AssertionError("there is no engine")


def _ask(server: Server, number: int, outcomes: list[str]) -> None:
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 300, "cache_salt": "slow:0.002"}
    try:
        if number % 2:
            answer = server.post("/v1/completions", body)
            outcomes.append("answer" if answer.status == 200 else f"error {answer.status}")
        else:
            with server.open_stream("/v1/completions", body) as response:
                text = response.read().decode()
            if response.status != 200:
                outcomes.append(f"error {response.status}")
            else:
                assert text.endswith("data: [DONE]\n\n")
                outcomes.append("error event" if '"error"' in text else "answer")
    except (OSError, http.client.HTTPException):
        outcomes.append("connection")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
        make_llama(Path(folder))
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # what others do in theirs is none of ours
        counts: Counter[str] = Counter()
        for seed in range(arguments.times):
            counts[trial(folder, seed)] += 1
            print(f"\r{seed + 1}", end="", file=sys.stderr, flush=True)
    print(f"{sum(counts.values())} kills, nothing left: {dict(counts)}")


if __name__ == "__main__":
    main()
