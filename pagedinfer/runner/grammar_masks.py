"""Which tokens the grammars of structured outputs allow next, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedinfer.engine.batch import AdmittedRequest
from pagedinfer.engine.grammars import GrammarCompiler
from pagedinfer.logging import get_logger
from pagedinfer.runner.token_history import TokenHistory

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = get_logger(__name__)

Words = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Constraint:
    """The grammar of one slot, and how far its text has come."""

    matcher: LLMatcher
    also_allowed: Words | None  # of allowed_token_ids: both must allow a token
    num_consumed: int = 0


class GrammarMasks:
    """Follows the texts of some slots. Its work is the CPU's, and is done while the GPU runs the model.

    Args:
        grammars: compiles them; None: this runner has none, and no request may bring one.
        vocab_size: of the model.
        history: of the tokens that the slots have drawn; who follows it is the caller's business.
    """

    def __init__(self, grammars: GrammarCompiler | None, vocab_size: int, history: TokenHistory) -> None:
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        self._history = history
        self._slots: dict[int, _Constraint] = {}

    def set(self, request: AdmittedRequest, also_allowed: Words | None) -> None:
        """Begins to follow a request that takes a slot, if it has a grammar."""
        self._slots.pop(request.slot, None)
        params = request.sampling_params.structured_outputs
        if params is not None:
            if self._grammars is None:
                raise ValueError("this runner was made without grammars, and a request has one")
            self._slots[request.slot] = _Constraint(self._grammars.matcher(params), also_allowed)

    def release(self, slot: int) -> None:
        """The request of a slot has left."""
        self._slots.pop(slot, None)

    @property
    def slots(self) -> Set[int]:
        """Those that it follows."""
        return self._slots.keys()

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def next(self, slots: Sequence[int]) -> Words:
        """A bit for each token that may come next in these slots: int32 [len(slots), ceil(vocabulary / 32)].

        Waits for the tokens of the steps that are under way.
        """
        assert self._grammars is not None
        constraints = [self._slots[slot] for slot in slots]
        for slot, constraint in zip(slots, constraints, strict=True):
            self._follow(constraint, self._history.output(slot))
        masks = self._grammars.masks([constraint.matcher for constraint in constraints])
        words = np.ascontiguousarray(masks[:, : self._num_words])
        for row, constraint in zip(words, constraints, strict=True):
            if constraint.matcher.is_error():
                logger.error("a grammar failed: %s", " ".join(constraint.matcher.get_error().split())[:300])
                row[:] = 0  # no token can be drawn, and the request ends with an error
            if constraint.also_allowed is not None:
                row &= constraint.also_allowed
        return words

    def _follow(self, constraint: _Constraint, output: list[int]) -> None:
        for token in output[constraint.num_consumed :]:
            if constraint.matcher.is_stopped():
                break  # EOS came, and the request goes on for a step or by ignore_eos
            constraint.matcher.consume_token(token)
        constraint.num_consumed = len(output)
