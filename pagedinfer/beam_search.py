"""What a beam search is asked for, and what it gives. Names are vLLM's. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagedinfer.outputs import FinishReason, RequestMetrics
from pagedinfer.parameter_checks import check_bool, integer, real

MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 32  # of a text of 2**31 tokens still within the range of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How one prompt is searched. `early_stopping` aside, the fields and their defaults are vLLM's.

    The search is transformers': a text's score is its log-probability over (generated tokens, EOS included)
    to the power of `length_penalty`, and at each position the best 2 * beam_width continuations are looked
    at (more, if the model has several EOS tokens), of which those that end count among the best beam_width
    only.

    Raises:
        ValueError: a value of the wrong type or out of range; the message names it and the range.
    """

    beam_width: int
    """Texts that are kept at each position, and returned; 1 to 64."""
    max_tokens: int
    """Most tokens to generate; at least 1."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token: all texts have max_tokens tokens."""
    temperature: float = 0.0
    """Nothing is drawn: only 0 is allowed."""
    length_penalty: float = 1.0
    """Above 0 favours long texts, below 0 short ones; [-32, 32]."""
    include_stop_str_in_output: bool = False
    """Keep the EOS token at the end of a sequence's tokens and text."""
    early_stopping: bool | Literal["never"] = False
    """When to stop once beam_width texts have ended. True: at once. False: when the best beam's score, were
    it to end now, is no better than the worst of them. "never": when it could not become better even by
    max_tokens."""

    def __post_init__(self) -> None:
        self._set("beam_width", integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH))
        self._set("max_tokens", integer("max_tokens", self.max_tokens, 1))
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        if self.temperature != 0.0:
            raise ValueError(f"temperature must be 0: beam search draws nothing, got {self.temperature!r}")
        most = MAX_LENGTH_PENALTY
        self._set("length_penalty", real("length_penalty", self.length_penalty, -most, most))
        stopping = self.early_stopping
        if not isinstance(stopping, bool) and not (isinstance(stopping, str) and stopping == "never"):
            raise ValueError(f'early_stopping must be True, False or "never", got {stopping!r}')

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


@dataclass(slots=True)
class BeamSearchSequence:
    """One text that a search has found."""

    tokens: list[int]
    """The prompt and what was generated, without the EOS token, unless include_stop_str_in_output."""
    cum_logprob: float
    """Sum of the log-probabilities of the generated tokens, EOS included."""
    score: float
    """What the sequences are ordered by: cum_logprob with the length penalty."""
    text: str | None = None
    """Of `tokens`; None without a tokenizer."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What the search of one prompt has found."""

    sequences: list[BeamSearchSequence]
    """The best first; beam_width of them."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    """Why the prompt could not be searched; there are no sequences then."""
