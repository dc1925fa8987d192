"""A histogram that costs next to nothing to feed: one comparison tree and two additions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by buckets.

    Args:
        bounds: upper bounds of the buckets, inclusive, rising; one without a bound follows.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus has them."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        found, running = [], 0
        for name, count in zip(names, self._counts, strict=True):
            running += count
            found.append((name, float(running)))
        return found


def ladder(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... times a power of ten, from `low` to `high`."""
    found = []
    power = 10.0**-6
    while power <= high:
        found += [factor * power for factor in (1, 2, 5) if low <= factor * power * 1.0000001 <= high * 1.1]
        power *= 10
    return [float(f"{value:.6g}") for value in found]
