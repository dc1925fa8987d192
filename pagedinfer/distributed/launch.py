"""Starts the ranks of an engine and tells each what it is."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pagedinfer.config import EngineConfig
from pagedinfer.distributed.channel import Kind
from pagedinfer.distributed.messages import Start, encode
from pagedinfer.distributed.nodes import NodeListener, ranks_on_each_node
from pagedinfer.distributed.ranks import Rank, end, spawn
from pagedinfer.errors import DeviceError

_SECONDS_TO_END = 5.0


class Launch:
    """All ranks of an engine, from their start to their end; those on other nodes come by themselves.

    Raises:
        DeviceError: there are fewer GPUs than ranks.
        EngineStartError: other nodes do not come, or do not fit.
    """

    def __init__(self, config: EngineConfig, folder: Path, num_known_tokens: int | None) -> None:
        self._config = config
        self._num_local_ranks = ranks_on_each_node(config)
        self.device, self._nccl = choose_devices(config, self._num_local_ranks)
        self.ranks: list[Rank] = []
        self._folder = tempfile.mkdtemp(prefix="pagedinfer-")
        try:
            listener = NodeListener(config) if config.nnodes > 1 else None
            for number in range(self._num_local_ranks):
                self.ranks.append(Rank(number, *spawn()))
            if listener is not None:
                self._add_other_nodes(listener)
            self._start(folder, num_known_tokens)
        except BaseException:
            self.end(0.0)
            raise

    def end(self, seconds: float = _SECONDS_TO_END) -> None:
        """Ends all ranks, those that do not end by themselves in so long by force."""
        end(self.ranks, seconds)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _add_other_nodes(self, listener: NodeListener) -> None:
        try:
            connections = listener.accept()
        finally:
            listener.close()
        for number in range(self._num_local_ranks, self._config.tensor_parallel_size):
            self.ranks.append(Rank(number, connections[number, False], connections[number, True], None))

    def _start(self, folder: Path, num_known_tokens: int | None) -> None:
        start = Start(
            rank=0,
            num_ranks=len(self.ranks),
            local_rank=0,
            num_local_ranks=self._num_local_ranks,
            store=self._make_store(),
            device=self.device,
            nccl=self._nccl,
            num_threads=max(1, torch.get_num_threads() // self._num_local_ranks),
            num_known_tokens=num_known_tokens,
            folder=str(folder),
            config=self._config,
        )
        for rank in self.ranks:
            mine = replace(start, rank=rank.number, local_rank=rank.number % self._num_local_ranks)
            with suppress(OSError):  # it has ended, which whoever waits for it finds out
                rank.data.send(Kind.START, encode(mine))

    def _make_store(self) -> str:
        """Where the ranks find each other: on one machine a file, so that nothing listens on a port."""
        if self._config.nnodes == 1:
            return os.path.join(self._folder, "store")
        host = self._config.master_addr
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"{host}:{self._store.port}"


def choose_devices(config: EngineConfig, num_local_ranks: int) -> tuple[str, bool]:
    """Whether ranks are on "cuda" or on the "cpu", and whether NCCL connects them.

    Raises:
        DeviceError: as many GPUs are wanted, and there are fewer.
    """
    num_gpus = torch.cuda.device_count()
    gloo = config.distributed_backend == "gloo"
    if config.device == "cpu" or (config.device == "auto" and num_gpus == 0):
        if config.distributed_backend == "nccl":
            raise DeviceError('distributed_backend="nccl" needs GPUs, and the ranks are on CPUs')
        return "cpu", False
    if num_gpus < (1 if gloo else num_local_ranks):
        raise DeviceError(
            f"{num_local_ranks} ranks need a GPU each, and there are {num_gpus}; lower "
            f'tensor_parallel_size, or set device="cpu"'
        )
    return "cuda", not gloo
