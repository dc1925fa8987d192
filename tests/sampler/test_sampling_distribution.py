"""The tokens drawn follow the filtered softmax: chi-squared tests over 200,000 draws a setting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation import logits_process

from tests import reference
from tests.sampler.slots import draw

NUM_DRAWS = 200_000

SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 10},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 20},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


def filtered_softmax(
    logits: npt.NDArray[np.float64],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> npt.NDArray[np.float64]:
    """In float64, written without a look at the kernels: sort, cut three times, renormalise."""
    order = np.argsort(-logits, kind="stable")
    probs = np.exp((logits[order] - logits.max()) / temperature)
    if top_k > 0:
        probs[top_k:] = 0
    probs /= probs.sum()
    if top_p < 1:
        probs[np.cumsum(probs) - probs >= top_p] = 0
    probs[probs < min_p * probs[0]] = 0
    result = np.zeros_like(probs)
    result[order] = probs / probs.sum()
    return result


def chi_squared_p_value(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> float:
    """How likely counts as far off as these are. Cells that expect fewer than 10 are put together."""
    expected = probs * counts.sum()
    small = expected < 10
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    if freedom == 0:
        return 1.0
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_filtered_distribution(setting: dict[str, float], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(sum(map(ord, str(setting))))
    logits = torch.randn(60, generator=generator) * 2
    probs = filtered_softmax(logits.double().numpy(), **setting)
    drawn = draw(logits.to(device), NUM_DRAWS, seeds=2024, **setting).cpu().numpy()
    counts = np.bincount(drawn, minlength=60)
    assert counts[probs == 0].sum() == 0
    assert chi_squared_p_value(counts, probs) > 1e-4


@pytest.mark.parametrize("num_draws", [20_000])
def test_draws_from_a_flat_row_of_many_tokens(num_draws: int, device: torch.device) -> None:
    """A nucleus of thousands, so that it is not among the few tokens at the top."""
    logits = torch.randn(8192, generator=torch.Generator().manual_seed(1))
    probs = filtered_softmax(logits.double().numpy(), top_p=0.8)
    drawn = draw(logits.to(device), num_draws, top_p=0.8).cpu().numpy()
    counts = np.bincount(drawn, minlength=8192)
    assert (probs > 0).sum() > 2048
    assert counts[probs == 0].sum() == 0
    parts = np.arange(8192) // 128
    assert (
        chi_squared_p_value(
            np.bincount(parts, weights=counts).astype(np.int64), np.bincount(parts, weights=probs)
        )
        > 1e-4
    )


def test_streams_of_different_seeds_and_positions_are_unrelated(device: torch.device) -> None:
    """Seeds that differ in one bit, and neighbouring positions, agree as often as chance has it."""
    logits = torch.zeros(64, device=device)
    streams = [draw(logits, 20_000, seeds=seed) for seed in (0, 1, 2**32, -(2**63))]
    pairs = [(a, b) for i, a in enumerate(streams) for b in streams[:i]]
    pairs += [(stream[1:], stream[:-1]) for stream in streams]
    for a, b in pairs:
        agreeing = int((a == b).sum())
        assert abs(agreeing - len(a) / 64) < 4.5 * math.sqrt(len(a) / 64)


@pytest.mark.parametrize("seed", range(20))
def test_kept_set_is_a_float64_sorts_up_to_the_boundary_token(seed: int) -> None:
    """The fixed-point arithmetic may move top-p's boundary by one token against float64, no more."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2000, generator=generator) * 3
    top_p = float(torch.rand((), generator=generator))
    kept, _ = reference.kept_tokens(logits.numpy(), 1.0, 0, top_p, 0.0)
    probs = filtered_softmax(logits.double().numpy(), top_p=float(np.float32(top_p)))
    assert len(set(kept.tolist()) ^ set(np.flatnonzero(probs).tolist())) <= 1


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s], ids=str)
def test_the_distribution_is_that_of_transformers_warpers(
    setting: dict[str, float], device: torch.device
) -> None:
    """In the order of transformers' generate: temperature, top-k, top-p, min-p."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5)) * 2
    makers: dict[str, Callable[[Any], Any]] = {
        "temperature": logits_process.TemperatureLogitsWarper,
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
        "min_p": logits_process.MinPLogitsWarper,
    }
    warped = logits
    for name, make in makers.items():
        if name in setting:
            warped = make(setting[name])(torch.zeros(1, 1, dtype=torch.long), warped)
    probs = warped[0].double().softmax(-1).numpy()
    counts = torch.bincount(
        draw(logits[0].to(device), 50_000, seeds=9, **setting).cpu(), minlength=60
    ).numpy()
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(probs))
    assert chi_squared_p_value(counts, probs) > 1e-4
