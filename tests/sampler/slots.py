"""Sampling parameters of slots, as `sample_tokens` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from pagedinfer import ops


class SlotParameters(TypedDict):
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def slot_parameters(
    num_slots: int,
    device: torch.device | str = "cpu",
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: int | Sequence[int] | Tensor = 0,
    positions: int | Sequence[int] | Tensor = 0,
) -> SlotParameters:
    """A number is the same for every slot; what is not given is off."""

    def tensor(value: float | Sequence[float] | Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(value, int | float):
            return torch.full((num_slots,), value, dtype=dtype, device=device)
        return torch.as_tensor(value, dtype=dtype).to(device)

    return SlotParameters(
        temperature=tensor(temperature, torch.float32),
        top_k=tensor(top_k, torch.int32),
        top_p=tensor(top_p, torch.float32),
        min_p=tensor(min_p, torch.float32),
        seeds=tensor(seeds, torch.int64),
        positions=tensor(positions, torch.int64),
    )


def mixed_parameters(num_slots: int, generator: torch.Generator) -> SlotParameters:
    """Every slot with parameters of its own, on the CPU: each filter off or on, mildly or to extremes."""

    def choose(values: Sequence[float]) -> list[float]:
        picks = torch.randint(len(values), (num_slots,), generator=generator)
        return [values[i] for i in picks.tolist()]

    return slot_parameters(
        num_slots,
        temperature=choose([0.0, 1e-5, 0.01, 0.5, 0.8, 1.0, 1.0, 1.0, 2.0, 100.0]),
        top_k=choose([0, 0, 0, 1, 5, 50, 1000, 1024, 1025, 5000]),
        top_p=choose([1.0, 1.0, 0.999999, 0.95, 0.9, 0.5, 1e-10]),
        min_p=choose([0.0, 0.0, 0.0, 1e-6, 0.1, 0.9, 1.0]),
        seeds=torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=generator),
        positions=torch.randint(0, 2**40, (num_slots,), generator=generator),
    )


def to_device(parameters: SlotParameters, device: torch.device | str) -> SlotParameters:
    return SlotParameters(**{name: value.to(device) for name, value in parameters.items()})


def all_slots(num_rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Row i uses slot i."""
    return torch.arange(num_rows, dtype=torch.int32, device=device)


def draw(logits: Tensor, num_draws: int, **parameters: float) -> Tensor:
    """Tokens drawn from one row of logits, [vocabulary], at positions 0, 1, 2, ... of one stream."""
    slots = slot_parameters(num_draws, logits.device, positions=torch.arange(num_draws), **parameters)
    return ops.sample_tokens(logits.expand(num_draws, -1), all_slots(num_draws, logits.device), **slots)
