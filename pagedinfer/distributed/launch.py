"""Starts the ranks of an engine and tells each what it is."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from pagedinfer.config import EngineConfig
from pagedinfer.distributed.channel import Kind
from pagedinfer.distributed.messages import Start, encode
from pagedinfer.distributed.ranks import Rank, end, spawn
from pagedinfer.errors import DeviceError

_SECONDS_TO_END = 5.0


class Launch:
    """All ranks of an engine, from their start to their end.

    Raises:
        DeviceError: there are fewer GPUs than ranks.
    """

    def __init__(self, config: EngineConfig, folder: Path, num_known_tokens: int | None) -> None:
        size = config.tensor_parallel_size
        self.device, nccl = choose_devices(config, size)
        self.ranks: list[Rank] = []
        self._folder = tempfile.mkdtemp(prefix="pagedinfer-")
        start = Start(
            rank=0,
            num_ranks=size,
            local_rank=0,
            num_local_ranks=size,
            store=os.path.join(self._folder, "store"),
            device=self.device,
            nccl=nccl,
            num_threads=max(1, torch.get_num_threads() // size),
            num_known_tokens=num_known_tokens,
            folder=str(folder),
            config=config,
        )
        try:
            for number in range(size):
                self.ranks.append(Rank(number, *spawn()))
            for rank in self.ranks:
                mine = replace(start, rank=rank.number, local_rank=rank.number)
                with suppress(OSError):  # it has ended, which whoever waits for it finds out
                    rank.data.send(Kind.START, encode(mine))
        except BaseException:
            self.end(0.0)
            raise

    def end(self, seconds: float = _SECONDS_TO_END) -> None:
        """Ends all ranks, those that do not end by themselves in so long by force."""
        end(self.ranks, seconds)
        shutil.rmtree(self._folder, ignore_errors=True)


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
