"""What the ranks of a pool do in the tests; imports as little as it can, since every rank has to."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from pagedinfer.distributed.group import SINGLE_RANK, Group
from tests.models.harness import load

Outputs = tuple[list[Tensor], list[list[int]]]


def logits_and_tokens(
    group: Group = SINGLE_RANK, *, path: str, prompts: list[list[int]], num_tokens: int
) -> Outputs:
    """The logits of prompts, computed in chunks, and what they go on with."""
    model = load(Path(path), group=group)
    return model.logits(prompts, chunk=16, block_size=8), model.greedy(prompts, num_tokens)
