"""Processes that are the ranks of a group, started once, for many tests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from pagedinfer.distributed.group import Group

SECONDS = 120  # for one task; a busy machine is slow


class RankPool:
    """Runs a function in all ranks at once, each with its group as first argument.

    On the CPU they are connected by gloo; on "cuda" each has a GPU of its own, NCCL, and peer memory.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, device, os.path.join(self._folder.name, "store"))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What it returns, by rank. Must be a function of a module; what it raises fails the test."""
        for connection in self._connections:
            connection.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            waiting = [each for i, each in enumerate(self._connections) if i not in results]
            ready = wait(waiting, SECONDS)
            assert ready, f"ranks {[i for i in range(len(self._connections)) if i not in results]} hang"
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                error, results[rank] = connection.recv()  # type: ignore[union-attr]
                assert error is None, f"rank {rank}: {error}"
        return [results[rank] for rank in range(len(self._connections))]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _serve(connection: Connection, rank: int, size: int, kind: str, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    from torch.distributed import FileStore

    from pagedinfer.distributed.peer_all_reduce import most_bytes
    from pagedinfer.distributed.torch_group import join

    torch.set_num_threads(1)
    on_gpu = kind == "cuda"
    device = torch.device(kind, rank) if on_gpu else torch.device(kind)
    if on_gpu:
        torch.cuda.set_device(device)
    group: Group = join(
        rank,
        size,
        FileStore(store, size),
        device,
        nccl=on_gpu,
        num_local_ranks=size,
        peer_bytes=most_bytes(size),
    )
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send((None, function(group, **arguments)))
        except Exception:
            connection.send((traceback.format_exc(), None))
    torch.distributed.destroy_process_group()
