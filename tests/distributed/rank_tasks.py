"""What the ranks of a pool do in the tests; imports as little as it can, since every rank has to."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from pagedinfer.config import EngineConfig
from pagedinfer.distributed import peer_all_reduce, torch_group
from pagedinfer.distributed.group import SINGLE_RANK, Group
from pagedinfer.distributed.peer_all_reduce import PeerAllReduce
from pagedinfer.distributed.torch_group import TorchGroup
from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.runner.worker import Worker
from tests.models.harness import few_rows_served, load

Outputs = tuple[list[Tensor], list[list[int]]]
Limits = dict[str, int]
LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_blocks",
    "num_cpu_blocks",
    "block_bytes",
)


def logits_and_tokens(
    group: Group = SINGLE_RANK,
    *,
    path: str,
    prompts: list[list[int]],
    num_tokens: int,
    device: str = "cpu",
    most_few_rows: int = 0,
) -> Outputs:
    """The logits of prompts, computed in chunks, and what they go on with."""
    model = load(Path(path), group=group, device=device)
    with few_rows_served(most_few_rows) if most_few_rows else nullcontext():
        logits = model.logits(prompts, chunk=16, block_size=8)
        tokens = model.greedy(prompts, num_tokens)
    return [each.cpu() for each in logits], tokens


# ---- a worker in each rank of a pool, for an engine in the test's process ----

_workers: list[Worker] = []


def make_worker(group: Group, *, config: EngineConfig, num_known_tokens: int | None, padded: bool) -> Limits:
    """Puts a worker into this process."""
    assert not _workers
    if padded:  # as CUDA graphs are, here without a graph
        sizes = {"_decode_sizes": lambda worker: [1, 4, 16], "_forward_sizes": lambda worker: [4, 24, 64]}
        with_sizes = type("PaddedWorker", (Worker,), sizes)
    else:
        with_sizes = Worker
    model_config = ModelConfig.from_pretrained(config.model)
    worker = with_sizes(config, model_config, num_known_tokens=num_known_tokens, group=group)
    _workers.append(worker)
    return {name: getattr(worker, name) for name in LIMITS}


def execute(group: Group, *, batch: Batch) -> StepOutput:
    return _workers[0].execute(batch).result()


def close_worker(group: Group) -> None:
    _workers.pop().close()


# ---- sums over peer memory ----


def connect_peers(group: TorchGroup, *, breaks: dict[int, str]) -> tuple[bool, bool, list[str]]:
    """Whether peers are there after ranks have failed as `breaks` says, were closed, and what is logged."""
    closed, logged = [], []

    class Peers:
        def __init__(self, *arguments: object) -> None:
            if breaks.get(group.rank) == "open":
                raise RuntimeError(f"rank {group.rank} cannot open")

        def check(self) -> None:
            if breaks.get(group.rank) == "check":
                raise RuntimeError(f"rank {group.rank} sums wrong")

        def close(self) -> None:
            closed.append(True)

    with (
        patch.object(torch_group, "PeerAllReduce", Peers),
        patch.object(torch_group.logger, "warning", lambda text, *rest: logged.append(text % rest)),
    ):
        peers = group._connect_peers(1 << 20, torch.device("cpu"))
    return peers is not None, bool(closed), logged


def sum_over_peers(group: TorchGroup, *, inputs: list[list[Tensor]], max_bytes: int) -> list[Tensor]:
    """This rank's tensor of each call, on GPU 0, summed with those of the others."""
    device = torch.device("cuda", 0)
    peers = PeerAllReduce(max_bytes, group.rank, device, group.tell_all)
    peers.check()
    found = []
    for of_ranks in inputs:
        data = of_ranks[group.rank].to(device)
        assert peers.takes(data)
        peers.all_reduce(data)
        found.append(data.cpu())
    group.least([0])  # nobody reads any more
    peers.close()
    return found


def check_alone(group: TorchGroup) -> str:
    """What rank 0 finds if the other sends it nothing."""
    peers = PeerAllReduce(1 << 20, group.rank, torch.device("cuda", 0), group.tell_all)
    message = ""
    if group.rank == 0:
        with patch.object(peer_all_reduce, "_SECONDS_TO_TRY", 0.3):
            try:
                peers.check()
            except RuntimeError as error:
                message = str(error)
    group.least([0])
    peers.close()
    return message
