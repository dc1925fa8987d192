"""How many tokens a second the API process carries, with an engine that costs nothing to wait for.

The scripted engine gives every stream a token in each step of a fixed length. The API process runs on one
core, the engine and the client on another. Counted are tokens, chunks, and the API process's CPU time.

    python -m tests.server.trials.streams [--streams 256] [--tokens 400] [--rate 20000]
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.server.rig import Server
from tests.tiny_models import make_llama

_MARK = b'"text":"'


class Streams(NamedTuple):
    """What was measured."""

    seconds: float
    num_tokens: int
    num_chunks: int
    cpu_seconds: float  # of the API process

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        """What one core would carry."""
        return self.num_tokens / self.cpu_seconds

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, {self.num_chunks:,} chunks for {self.num_tokens:,}; "
            f"API process {100 * self.cpu_seconds / self.seconds:.0f} % of a core, so that one carries "
            f"{self.tokens_per_cpu_second:,.0f} tokens/s"
        )


def measure(model: str, *, streams: int, tokens: int, rate: float) -> Streams:
    """Reads so many streams of so many tokens each at once, `rate` tokens a second together."""
    flags = ["--max-num-seqs", str(streams), "--max-model-len", "100000"]
    with Server(model, *flags, scripted=True) as server:
        cores = sorted(os.sched_getaffinity(0))
        engine = server.engine_pid()
        if len(cores) > 1:
            pin(server.process.pid, cores[0])
            pin(engine, cores[1])
            pin(os.getpid(), cores[1])
        try:
            return _read(server, streams, tokens, streams / rate)
        finally:
            os.sched_setaffinity(0, cores)


def pin(pid: int, core: int) -> None:
    """Runs all threads of a process on one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def cpu_seconds(pid: int) -> float:
    """That a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read(server: Server, streams: int, tokens: int, step_seconds: float) -> Streams:
    """Reads with as little work as there can be: the engine has to live on the client's core."""
    body = {"prompt": "abcd", "max_tokens": tokens, "stream": True, "cache_salt": f"pace:{step_seconds}"}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
    before = cpu_seconds(server.process.pid)
    started = time.perf_counter()
    tails: dict[int, bytes] = {}  # by socket: the beginning of what may be a chunk's mark
    sockets = {}
    num_chunks = 0
    done = set()
    with select.epoll() as ready:
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(request)
            sockets[connection.fileno()] = connection
            tails[connection.fileno()] = b""
            ready.register(connection, select.EPOLLIN)
        while sockets:
            for number, _ in ready.poll():
                part = sockets[number].recv(65536)
                if part:
                    held = tails[number] + part
                    num_chunks += held.count(_MARK)
                    if b"[DONE]" in held:
                        done.add(number)
                    tails[number] = held[1 - len(_MARK) :]
                else:
                    assert number in done, "a stream was cut off"
                    ready.unregister(number)
                    sockets.pop(number).close()
    seconds = time.perf_counter() - started
    return Streams(seconds, streams * tokens, num_chunks, cpu_seconds(server.process.pid) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rate", type=float, default=20_000, help="tokens a second")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder))
        print(measure(folder, **vars(arguments)))


if __name__ == "__main__":
    main()
