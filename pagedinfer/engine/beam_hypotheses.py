"""The arithmetic of beam search: which continuations live on, which texts have ended, when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedinfer.beam_search import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and one more token."""

    beam: int  # index of the beam
    token_id: int
    cum_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended."""

    token_ids: list[int]  # generated, EOS included
    cum_logprob: float
    score: float
    ended_by_eos: bool


class BeamHypotheses:
    """The texts of one prompt that have ended, the best first, and the rules by which beams go on.

    Args:
        params: of the search.
        eos_token_ids: what ends a text; looked at unless `params.ignore_eos`.
        max_tokens: generated tokens at which every text ends.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        self.ended: list[Hypothesis] = []
        self.finished = False  # whether the search is over
        # So many continuations always hold beam_width that do not end.
        self.num_candidates = max(2, 1 + len(self._eos)) * params.beam_width

    def advance(
        self,
        beams: Sequence[tuple[list[int], float]],
        candidates: Sequence[Sequence[tuple[int, float]]],
    ) -> list[Continuation]:
        """The continuations that live on, the best first; none when the search is over.

        Args:
            beams: (generated tokens, their log-probability) of each beam; all have equally many tokens.
            candidates: for each beam the best tokens and their log-probabilities, at least
                `num_candidates` of them or the whole vocabulary.
        """
        width = self._params.beam_width
        num_tokens = len(beams[0][0]) + 1
        continuations = [
            Continuation(beam, token, cum_logprob + logprob)
            for beam, (_, cum_logprob) in enumerate(beams)
            for token, logprob in candidates[beam]
        ]
        continuations.sort(key=lambda each: -each.cum_logprob)
        living: list[Continuation] = []
        ending: list[Hypothesis] = []
        for place, each in enumerate(continuations[: self.num_candidates]):
            by_eos = each.token_id in self._eos
            if not by_eos and num_tokens < self._max_tokens:
                living.append(each)
            elif place < width:
                token_ids = [*beams[each.beam][0], each.token_id]
                score = self._score(each.cum_logprob, num_tokens)
                ending.append(Hypothesis(token_ids, each.cum_logprob, score, by_eos))
        self.ended = sorted(self.ended + ending, key=lambda each: -each.score)[:width]
        living = living[:width]
        self.finished = not living or self._is_decided(living[0].cum_logprob, num_tokens)
        return [] if self.finished else living

    def _is_decided(self, best_logprob: float, num_tokens: int) -> bool:
        if len(self.ended) < self._params.beam_width:
            return False
        stopping = self._params.early_stopping
        if stopping is True:
            return True
        favours_long = stopping == "never" and self._params.length_penalty > 0
        length = self._max_tokens if favours_long else num_tokens
        return self._score(best_logprob, length) <= self.ended[-1].score

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / math.pow(num_tokens, self._params.length_penalty)
