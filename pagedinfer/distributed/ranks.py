"""The processes of the ranks, as the engine sees them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pagedinfer
from pagedinfer.distributed.channel import Channel

PROGRAM = ("-P", "-m", "pagedinfer.distributed.rank_process")
"""What a rank runs."""
_SECONDS_TO_SEND = 8


class Rank:
    """One rank: its process, if that is on this machine, and the two channels to it.

    `data` carries steps and their results, `control` questions to the rank while it is at work, and what
    ends it.
    """

    def __init__(
        self, number: int, data: Channel, control: Channel, process: subprocess.Popen[bytes] | None
    ) -> None:
        self.number = number
        self.data = data
        self.control = control
        self.process = process
        data.limit_sends(_SECONDS_TO_SEND)
        control.limit_sends(_SECONDS_TO_SEND)

    @property
    def name(self) -> str:
        """For messages."""
        where = "another node" if self.process is None else f"process {self.process.pid}"
        return f"rank {self.number} ({where})"

    def how_it_ended(self) -> str | None:
        """What its process ended by; None if it has not, or is on another node."""
        if self.process is None or self.process.poll() is None:
            return None
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"was killed by signal {-code}"


def spawn() -> tuple[Channel, Channel, subprocess.Popen[bytes]]:
    """Starts the process of a rank: the channels to it, for data and for control, and the process.

    It is a new interpreter, so that a program that makes an LLM needs no guard around its main part.
    """
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    data, control = (Channel(each) for each in ours)
    process = spawn_on(theirs)
    return data, control, process


def spawn_on(sockets: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Starts the process of a rank with these sockets, for data and for control, which are its own then."""
    folder = str(Path(pagedinfer.__file__).parents[1])
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    numbers = [each.fileno() for each in sockets]
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        pass_fds=numbers,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    for each in sockets:
        each.close()
    return process


def end(ranks: Sequence[Rank], seconds: float) -> None:
    """Closes the channels, upon which ranks end, and kills those that have not after so long."""
    for rank in ranks:
        rank.data.close()
        rank.control.close()
    end_processes([rank.process for rank in ranks if rank.process is not None], seconds)


def end_processes(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Waits for the processes, and kills those that have not ended after so long."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
