"""Whom to admit: as many requests as will fit while all of them grow, and no more.

Admitting whatever has room for its prompt fills the cache with requests that then evict each other;
reserving `max_tokens` leaves most of it empty. Between the two stands a forecast. The lengths of
finished outputs say how long those that run may yet get; from this follows when each will end and give
back its blocks, and so the highest the use of the cache will get. A request is admitted if that peak,
with it, stays within the pool. (After the Past-Future scheduler of Gong et al., ASPLOS 2025.)

Two things keep the forecast straight. Requests that still run are evidence too: they are longer than
what they have generated. The distribution of lengths is therefore the estimator of Kaplan and Meier
(1958), with those that run as censored observations; without it, the first to finish, which are the
short ones, would mislead. And each request is given a length of its own from that distribution, at its
own fixed quantile: were all given the mean, none would end before the others, and the peak would come
out far too high.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler_config import SchedulerConfig

_WINDOW = 1024  # finished requests that are remembered
_REFIT_EVENTS = 16  # ends between two looks at their lengths
_PRIOR_REST = 64.0  # tokens expected beyond all that was ever seen, at least
_MAX_MARGIN = 0.25  # of the pool
_MARGIN_STEP = 0.005  # a preemption adds this to the margin
_MARGIN_DECAY = 0.995  # a request that finishes without one multiplies it by this

# Consecutive multiples of this, modulo 1, are spread as evenly as any (the golden ratio's fraction).
_GOLDEN = 0.6180339887498949

Floats = npt.NDArray[np.float64]


def quantile_of(request: Request) -> float:
    """Where in the distribution of lengths a request is taken to be: in [0, 1), its own, and fixed."""
    _, arrival, fork = request.urgency
    return (arrival + 0.5 * fork) * _GOLDEN % 1.0


class OutputLengths:
    """The distribution of the number of tokens that requests generate."""

    def __init__(self) -> None:
        self._finished: deque[int] = deque(maxlen=_WINDOW)
        self._ages: Floats = np.zeros(1)  # numbers of tokens, ascending from 0
        self._survival: Floats = np.ones(1)  # share of requests that generate more than so many

    @property
    def longest(self) -> float:
        """The most that any request had generated when last looked at."""
        return float(self._ages[-1])

    def observe(self, length: int) -> None:
        """A request ended of its own accord after `length` tokens."""
        self._finished.append(length)

    def refit(self, running: Floats) -> None:
        """Takes in what those that run have generated so far."""
        ended = np.fromiter(self._finished, np.float64, len(self._finished))
        ages, index = np.unique(np.concatenate([[0.0], ended, running]), return_inverse=True)
        ends = np.bincount(index[1 : 1 + len(ended)], minlength=len(ages))
        # At equal age an end comes before a censoring: all that get so far were at risk.
        at_risk = np.bincount(index[1:], minlength=len(ages))[::-1].cumsum()[::-1]
        self._ages = ages
        self._survival = np.cumprod(1.0 - ends / np.maximum(at_risk, 1))

    def mean(self) -> float:
        """Of the distribution; what outlives all that was seen is expected to double its age."""
        tail = max(self.longest, _PRIOR_REST) * self._survival[-1]
        return float(np.sum(self._survival[:-1] * np.diff(self._ages)) + tail)

    def rest(self, generated: Floats, quantile: Floats) -> Floats:
        """Tokens still to come of requests that have generated so many, at these quantiles of the rest.

        Beyond all that was ever seen, a request is expected to go on for as long again.
        """
        alive = self._survival[np.searchsorted(self._ages, generated, side="right") - 1]
        end = np.searchsorted(-self._survival, -alive * (1.0 - quantile), side="left")
        beyond = np.maximum(generated, max(self.longest, _PRIOR_REST))
        ages = np.append(self._ages, np.inf)
        seen = (end < len(self._ages)) & (generated < self.longest)
        return np.where(seen, np.maximum(ages[end] - generated, 1.0), beyond)


class AdmissionControl:
    """Forecasts the use of the cache, and says whether one more request is within it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._num_blocks = config.num_blocks
        self._block_size = config.block_size
        self._greedy = config.admission_policy == "greedy"
        self._least_margin = config.watermark
        self._margin = config.watermark  # share of the pool left free, for what the forecast misses
        self._lengths = OutputLengths()
        self._refit_at = 0  # events by then
        self.last_peak = 0.0  # blocks, of the last forecast
        self._num_events = 0  # ends and preemptions: what may turn a refusal into an admission

    @property
    def margin(self) -> float:
        """Share of the pool that the forecast leaves free: grows with each preemption, fades without."""
        return self._margin

    @property
    def num_events(self) -> int:
        """Changes when somebody ended: a refused request is worth another look."""
        return self._num_events

    def expected_length(self) -> float:
        """Tokens that a new request is expected to generate, as of the last forecast."""
        return self._lengths.mean()

    def observe_end(self, request: Request, *, complete: bool) -> None:
        """A request left for good; `complete`: it was not cut off from outside."""
        self._num_events += 1
        if complete:
            self._lengths.observe(request.num_output_tokens)
            if request.num_preemptions == 0:
                self._margin = max(self._least_margin, self._margin * _MARGIN_DECAY)

    def observe_preemption(self) -> None:
        """Blocks ran out: the forecast was too low."""
        self._num_events += 1
        if self._greedy:
            return
        self._margin = min(max(self._least_margin, _MAX_MARGIN), self._margin + _MARGIN_STEP)

    def fits_at_worst(self, candidate: Request, num_running: int, num_limit_tokens: int) -> bool:
        """Whether all would fit even at their limits, which add up to `num_limit_tokens` so far."""
        num_tokens = num_limit_tokens + candidate.max_total_tokens
        return num_tokens // self._block_size + num_running + 1 <= self._room

    def fits(self, running: Sequence[Request], candidate: Request, num_own: int, num_used: int) -> bool:
        """Whether the use of the cache stays within the pool if `candidate` joins those `running`.

        Args:
            running: those that it may not displace.
            num_own: blocks that it would hold alone, for the tokens that it has.
            num_used: blocks in use if it were admitted.
        """
        if self._greedy:
            self.last_peak = float(num_used)
        else:
            self.last_peak = self._forecast_peak(running, candidate, num_own, num_used)
        return self.last_peak <= self._room

    @property
    def _room(self) -> float:
        return self._num_blocks * (1.0 - self._margin)

    def _forecast_peak(
        self, running: Sequence[Request], candidate: Request, num_own: int, num_used: int
    ) -> float:
        """The most blocks ever in use if all goes as expected."""
        everyone = [*running, candidate]
        num_tokens = np.array([request.num_tokens for request in everyone])
        generated = num_tokens - np.array([request.num_prompt_tokens for request in everyone])
        limit = np.array([request.max_total_tokens for request in everyone]) - num_tokens
        exact = np.array([request.ends_by_length_only for request in everyone])
        # Blocks that each holds alone, and those that its prompt lacks still; num_used has all of the
        # candidate's.
        held = np.array([len(request.block_ids) for request in everyone])
        shared = np.array([request.num_shared_blocks for request in everyone])
        missing = np.maximum(0, -(-num_tokens // self._block_size) - held)
        own = held + missing - shared
        own[-1], missing[-1] = num_own, 0

        if self._num_events >= self._refit_at or generated.max() > self._lengths.longest:
            self._lengths.refit(generated[:-1])
            self._refit_at = self._num_events + _REFIT_EVENTS
        quantile = np.array([quantile_of(request) for request in everyone])
        rest = np.where(exact, limit, np.minimum(limit, self._lengths.rest(generated, quantile)))

        order = np.argsort(rest)
        rest, own = rest[order], own[order]
        # Just before the i-th request ends: those before it have given back what was theirs, and each
        # of the others has grown by rest[i] tokens.
        given_back = np.cumsum(own) - own
        num_left = np.arange(len(rest), 0, -1)
        return float(np.max(num_used + missing.sum() - given_back + num_left * rest / self._block_size))
