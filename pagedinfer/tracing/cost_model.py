"""How long a step takes, as a sum of what it does, fitted to the steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedinfer.engine.batch import Batch

Floats = npt.NDArray[np.float64]

_PARTS = (
    "step",  # whatever it does
    "prompts",  # if it has any: its launch is another one
    "decoded token",
    "prompt token",
    "token of context read by a decode",
    "pair of tokens in a prompt's attention",
    "block swapped",
)
_OUTLIERS = 0.02  # share of the steps that are left out of the second fit: warm-up, other processes
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step, linear in what it does; none of the parts is negative."""

    seconds: dict[str, float]
    """For one of each part."""
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
    num_decodes = num_prompt_tokens = context = 0
    pairs = 0.0
    for work in batch.requests:
        if work.num_tokens == 1:
            num_decodes += 1
            context += work.start + 1
        else:
            num_prompt_tokens += work.num_tokens
            pairs += work.num_tokens * (work.start + work.num_tokens / 2)
    has_prompts = bool(num_prompt_tokens or batch.admitted)
    swapped = len(batch.swaps_out) + len(batch.swaps_in)
    return np.array(
        [1.0, has_prompts, num_decodes, num_prompt_tokens, context, pairs, swapped], dtype=np.float64
    )


def fit(steps: Sequence[tuple[Floats, float]]) -> CostModel:
    """The model that explains steps best, given as (features, seconds).

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("the trace has no steps with results: there is nothing to fit a cost model to")
    inputs = np.stack([step for step, _ in steps])
    seconds = np.array([duration for _, duration in steps])
    kept = np.ones(len(seconds), bool)
    for _ in range(_ROUNDS):
        weights = _nonnegative(inputs[kept], seconds[kept])
        # Sums count in the end, so that steps are compared in seconds; but one that waited for something
        # else entirely says nothing.
        residual = np.abs(inputs @ weights - seconds)
        kept = residual <= np.quantile(residual, 1 - _OUTLIERS)
    predicted = inputs @ weights
    error = float(np.median(np.abs(predicted - seconds) / np.maximum(seconds, 1e-9)))
    return CostModel(dict(zip(_PARTS, weights.tolist(), strict=True)), error)


def _nonnegative(inputs: Floats, seconds: Floats) -> Floats:
    """Least squares without negative weights: what comes out negative is taken out, the worst first."""
    scale = np.maximum(np.abs(inputs).max(axis=0), 1e-12)
    active = np.abs(inputs).max(axis=0) > 0
    while True:
        weights = np.zeros(inputs.shape[1])
        columns = np.flatnonzero(active)
        weights[columns] = np.linalg.lstsq(inputs[:, columns] / scale[columns], seconds, rcond=None)[0]
        if (weights >= 0).all() or not active.any():
            return weights / scale  # type: ignore[no-any-return]
        active[int(np.argmin(weights))] = False
