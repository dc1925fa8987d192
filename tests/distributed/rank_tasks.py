"""What the ranks of a pool do in the tests; imports as little as it can, since every rank has to."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from pagedinfer.config import EngineConfig
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


def sum_over_peers(group: TorchGroup, *, inputs: list[list[Tensor]], max_bytes: int) -> list[Tensor]:
    """This rank's tensor of each call, on GPU 0, summed with those of the others."""
    device = torch.device("cuda", 0)
    peers = PeerAllReduce(max_bytes, group.rank, device, group.tell_all)
    found = []
    for of_ranks in inputs:
        data = of_ranks[group.rank].to(device)
        assert peers.takes(data)
        peers.all_reduce(data)
        found.append(data.cpu())
    group.least([0])  # nobody reads any more
    peers.close()
    return found
