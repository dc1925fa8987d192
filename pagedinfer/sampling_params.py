"""How one request is sampled: its parameters, checked when they are made. Torch-free."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from pagedinfer.parameter_checks import check_bool, integer, real
from pagedinfer.structured_outputs import StructuredOutputsParams
from pagedinfer.unicode_text import check_unicode
from pagedinfer.vllm_names import hint

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a request is greedy."""

MAX_CHOICES = 16384
MAX_LOGIT_BIAS = 100.0


class RequestOutputKind(Enum):
    """What each output of a request holds while it runs."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # nothing until the request has finished


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names, defaults and ranges are vLLM's.

    Where engines differ, this one does the following. `max_tokens` counts generated tokens only. A
    temperature below 1e-5 is greedy; one in [1e-5, 0.01) is used as it is. `top_p` of 0 is an error, here
    and in the server; `top_k=1` is the way to ask for the most likely token. Greedy with n > 1 gives n
    equal choices.

    The filters apply in this order: temperature, top-k, top-p on the renormalised rest, min-p.

    Raises:
        TypeError: a name that is none of these; the message has the nearest, or what to do instead.
        ValueError: a value of the wrong type or out of range (NaN and infinities always are); the message
            names the field, the value and the range.
    """

    n: int = 1
    """Choices to generate for the prompt; 1 to 16384."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated already; [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the token was generated; [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of prompt and output tokens; [1e-6, 1e6], 1: off."""
    temperature: float = 1.0
    """[0, 2]; below 1e-5: greedy, the most likely token, ties to the lowest id."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to this; (0, 1], 1: off."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 and -1: off."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one; [0, 1], 0: off."""
    seed: int | None = None
    """Makes the request reproducible; a signed 64-bit integer. None and -1: none is given."""
    stop: str | Sequence[str] | None = None
    """Strings that end the generation where they appear in the generated text."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the generation."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; at least 1. None: as many as the context (max_model_len) has room for. Where
    that is less than this, the output ends there with the finish_reason "length"."""
    min_tokens: int = 0
    """Neither EOS nor a stop ends the generation before this many tokens; 0 to max_tokens."""
    logprobs: int | None = None
    """Log-probabilities of this many best tokens at each position; -1: of the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    detokenize: bool = True
    """Give text as well as token ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output holds while the request runs."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; clamped to [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be generated."""
    bad_words: Sequence[str] | None = None
    """Texts that are never generated."""
    logits_processors: Sequence[Callable[..., Any]] | None = None
    """Called in order on the row of logits, float32 [vocabulary] on the model's device, before all else; each
    returns the row to go on with. Called as f(output_token_ids, row), or, if it has three parameters, as
    f(prompt_token_ids, output_token_ids, row). What one raises ends the call of `generate`."""
    structured_outputs: StructuredOutputsParams | None = None
    """What form the text must have; also a mapping with the fields of StructuredOutputsParams."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many last tokens of the prompt; at least 1. -1: as many as leave room for max_tokens."""

    def __new__(cls, **given: Any) -> Self:
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise TypeError(
                    f"SamplingParams has no parameter {name!r}{hint(name, cls.__dataclass_fields__)}"
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, real(name, getattr(self, name), -2.0, 2.0))
        self._set("repetition_penalty", real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6))
        self._set("temperature", real("temperature", self.temperature, 0.0, 2.0))
        self._set("top_p", real("top_p", self.top_p, 0.0, 1.0, low_open=True))
        self._set("min_p", real("min_p", self.min_p, 0.0, 1.0))
        self._set("n", integer("n", self.n, 1, MAX_CHOICES))
        self._set("top_k", integer("top_k", self.top_k, -1, 2**31 - 1))
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0))
        for name, low in (
            ("max_tokens", 1),
            ("logprobs", -1),
            ("prompt_logprobs", -1),
            ("truncate_prompt_tokens", -1),
        ):
            if getattr(self, name) is not None:
                self._set(name, integer(name, getattr(self, name), low))
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1, got 0")
        if self.seed is not None:
            seed = integer("seed", self.seed, -(2**63), 2**63 - 1)
            self._set("seed", None if seed == -1 else seed)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            check_bool(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        self._set("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must name at least one token, got none")
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        processors = self.logits_processors
        if processors is not None and not isinstance(processors, Sequence):
            raise ValueError(f"logits_processors must be a list of callables, got {processors!r}")
        for processor in processors or ():
            if not callable(processor):
                raise ValueError(f"logits_processors must be callables, got {processor!r}")
        structured = self.structured_outputs
        if isinstance(structured, Mapping):
            self._set("structured_outputs", StructuredOutputsParams.from_mapping(structured))
        elif not isinstance(structured, StructuredOutputsParams | None):
            raise ValueError(f"structured_outputs must be StructuredOutputsParams, got {structured!r:.80}")
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be in [0, max_tokens], got {self.min_tokens} with "
                f"max_tokens={self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop needs the text: it cannot be used with detokenize=False")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if there is none."""
        return tuple(self.stop or ())

    def check_model(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Checks what depends on the model: that token ids exist, and how many log-probabilities.

        Raises:
            ValueError: a token id outside [0, vocab_size), or more log-probabilities than max_logprobs
                (-1, the whole vocabulary, counts as vocab_size; a max_logprobs of -1 allows it).
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token_id in ids or ():
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"{name} must hold token ids in [0, {vocab_size}), the vocabulary, got {token_id}"
                    )
        limit = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and (vocab_size if count == -1 else count) > limit:
                raise ValueError(f"{name} must be at most {limit} (max_logprobs), got {count}")


def _strings(name: str, values: Sequence[str] | None) -> tuple[str, ...]:
    if values is not None and (isinstance(values, str) or not isinstance(values, Sequence)):
        raise ValueError(f"{name} must be a list of strings, got {values!r}")
    for value in values or ():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must hold non-empty strings, got {value!r}")
        check_unicode(name, value)
    return tuple(values or ())


def _token_ids(name: str, values: Sequence[int] | None) -> tuple[int, ...]:
    if values is not None and (isinstance(values, str) or not isinstance(values, Sequence)):
        raise ValueError(f"{name} must be a list of token ids, got {values!r}")
    return tuple(integer(name, value, 0) for value in values or ())


def _logit_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r}")
    clamped: dict[int, float] = {}
    for key, value in bias.items():
        try:  # JSON can only have strings as keys
            token_id = integer("logit_bias", int(key) if isinstance(key, str) else key, 0)
        except ValueError:
            raise ValueError(f"logit_bias must have token ids as keys, got {key!r}") from None
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not -math.inf <= value <= math.inf:  # NaN fails the comparison
            raise ValueError(f"logit_bias must have numbers as values, got {value!r} for token {token_id}")
        clamped[token_id] = float(max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value)))
    return clamped
