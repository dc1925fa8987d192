"""How long a step takes, as a sum of what it does, fitted to the steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedinfer.engine.batch import Batch

Floats = npt.NDArray[np.float64]

# What a token costs depends on how many there are: a GPU computes few in the time that it reads the weights
# in and is bound by arithmetic with many, a CPU computes several rows quicker than one by one. So it may
# change at these numbers, either way.
_KNOTS = (0, 16, 64, 128, 256)

_PARTS = (
    "step",  # whatever it does
    "prompts",  # if it has any: its launch is another one
    "request",
    "token of context read by a decode",
    "pair of tokens in a prompt's attention",
    "block swapped",
    "token",
    *(f"token beyond {knot}" for knot in _KNOTS[1:]),
)
_ROUNDS = 12
_USUAL = 0.25  # relative error beyond which a step counts less, by its distance
_OUTLIER = 2.0  # and from which on it does not count: warm-up, other processes
_LEAST = 0.3  # of the median: shorter steps are weighted as if they were so long
_BELIEF = 1e-6  # of a step's squared error: what no step tells is as `_beliefs` says


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step, linear in what it does; none of the parts is negative."""

    seconds: dict[str, float]
    """For one of each part; "token beyond 64" is each after the 64th, up to the next such number."""
    error: float
    """Median relative error on the steps that it was fitted to."""

    def predict(self, batch: Batch) -> float:
        """Seconds that a step takes."""
        return float(features(batch) @ np.array([self.seconds[part] for part in _PARTS]))

    def describe(self) -> str:
        """One line: the parts that cost anything."""
        parts = [
            f"{1e6 * self.seconds[part]:.3g} us a {part}" for part in _PARTS[2:] if self.seconds[part] > 0
        ]
        base, prompts = 1e3 * self.seconds["step"], 1e3 * self.seconds["prompts"]
        first = f"{base:.2f} ms a step" + (f" (+{prompts:.2f} with prompts)" if prompts else "")
        return ", ".join([first, *parts]) + f"; median error {100 * self.error:.0f} %"


def features(batch: Batch) -> Floats:
    """How much of each part a step has."""
    context, pairs = 0, 0.0
    for work in batch.requests:
        if work.num_tokens == 1:
            context += work.start + 1
        else:
            pairs += work.num_tokens * (work.start + work.num_tokens / 2)
    num_tokens, num_requests = batch.num_tokens, len(batch.requests)
    has_prompts = num_tokens > num_requests or bool(batch.admitted)
    swapped = len(batch.swaps_out) + len(batch.swaps_in)
    return np.array(
        [1.0, has_prompts, num_requests, context, pairs, swapped, *_pieces(num_tokens)], np.float64
    )


def _pieces(num_tokens: int) -> list[int]:
    """How many of the tokens are behind each knot and before the next."""
    ends = (*_KNOTS[1:], num_tokens)
    return [max(0, min(num_tokens, end) - knot) for knot, end in zip(_KNOTS, ends, strict=True)]


def fit(steps: Sequence[tuple[Floats, float]]) -> CostModel:
    """The model that explains steps best, given as (features, seconds).

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("the trace has no steps with results: there is nothing to fit a cost model to")
    inputs = np.stack([step for step, _ in steps])
    seconds = np.array([duration for _, duration in steps])
    expected, trust = seconds, np.ones(len(seconds))
    beliefs = np.sqrt(_BELIEF * len(seconds)) * _beliefs() / np.median(seconds)
    targets = np.zeros(len(beliefs))
    for _ in range(_ROUNDS):
        # By relative errors, or the few steps with long prompts would outweigh all the others.
        scale = trust / np.maximum(expected, _LEAST * np.median(expected))
        weights = _nonnegative(
            np.concatenate([inputs * scale[:, None], beliefs]), np.concatenate([seconds * scale, targets])
        )
        expected = np.maximum(inputs @ weights, 1e-9)
        error = np.abs(expected - seconds) / expected
        trust = np.sqrt(np.minimum(1.0, _USUAL / np.maximum(error, 1e-9))) * (error < _OUTLIER)
    # In the end sums count, without steps that waited for something else entirely.
    usual = error < _OUTLIER
    weights *= seconds[usual].sum() / expected[usual].sum()
    return CostModel(dict(zip(_PARTS, weights.tolist(), strict=True)), float(np.median(error)))


def _beliefs() -> Floats:
    """What is zero where nothing speaks against it, by row: bends at the knots, and the cost of requests."""
    rows = np.zeros((len(_KNOTS), len(_PARTS)))
    first = _PARTS.index("token")
    for i, knot in enumerate(_KNOTS[1:]):
        rows[i, first + i : first + i + 2] = -knot, knot  # how much more tokens cost behind it than before
    rows[-1, _PARTS.index("request")] = _KNOTS[2]
    return rows


def _nonnegative(inputs: Floats, seconds: Floats) -> Floats:
    """Least squares without negative weights (Lawson and Hanson, 1974)."""
    scale = np.maximum(np.abs(inputs).max(axis=0), 1e-12)
    inputs = inputs / scale
    weights = np.zeros(inputs.shape[1])
    free = np.zeros(len(weights), bool)  # the others are held at zero
    enough = 1e-10 * np.abs(inputs.T @ seconds).max()
    for _ in range(10 * len(weights)):
        gain = np.where(free, -np.inf, inputs.T @ (seconds - inputs @ weights))
        if gain.max() <= enough:
            break
        free[np.argmax(gain)] = True
        while True:
            best = np.zeros(len(weights))
            best[free] = np.linalg.lstsq(inputs[:, free], seconds, rcond=None)[0]
            negative = free & (best <= 0)
            if not negative.any():
                break
            # As far towards it as no weight turns negative; the first that would is held at zero.
            share = np.min(weights[negative] / np.maximum(weights[negative] - best[negative], 1e-300))
            weights += share * (best - weights)
            free &= weights > 1e-15
        weights = best
    return weights / scale  # type: ignore[no-any-return]
