"""Grammars of structured outputs, compiled by llguidance, and kept for the next request. Torch-free."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagedinfer.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MAX_CACHED_GRAMMARS = 128
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"


class GrammarCompiler:
    """Makes matchers, which say token by token what may come next. Any thread may use it.

    Args:
        tokenizer: called once, when the first grammar is compiled.
        vocab_size: of the model.
        eos_token_ids: end a text that is complete.
    """

    def __init__(
        self,
        tokenizer: Callable[[], PreTrainedTokenizerBase | None],
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self._load_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None  # its threads
        self._cached: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the beginning of a text.

        Raises:
            ValueError: the grammar is wrong or too complex, or there is no tokenizer or no llguidance.
        """
        with self._lock:
            compiled = self._cached.pop(params, None)
            if compiled is None:
                compiled = self._compile(params)
            self._cached[params] = compiled
            if len(self._cached) > MAX_CACHED_GRAMMARS:
                self._cached.popitem(last=False)
            return compiled.deep_copy()

    def prepare(self) -> None:
        """Reads the vocabulary now, which takes a second for a large one, and not at the first request.

        Raises:
            ValueError: as `matcher`.
        """
        with self._lock:
            self._vocabulary()

    def masks(self, matchers: Sequence[LLMatcher]) -> npt.NDArray[np.int32]:
        """A bit for each token that each of these matchers allows next.

        Several are computed by several threads: most masks take some 20 microseconds, and some take
        milliseconds.

        Returns:
            int32 [len(matchers), words], words of the tokenizer's vocabulary, the lowest ids first. Of a
            matcher that is in error afterwards (`is_error`), anything.
        """
        with self._lock:
            masks = self._room_for_masks(len(matchers))
            if self._executor is None and len(matchers) > 1:
                self._executor = _llguidance().LLExecutor()
        if len(matchers) > 1:
            rows = [(matcher, row) for row, matcher in enumerate(matchers)]
            _numpy_masks().fill_next_token_bitmask_par(self._executor, rows, masks)
        elif matchers:
            _numpy_masks().fill_next_token_bitmask(matchers[0], masks)
        return masks

    @property
    def num_cached(self) -> int:
        """How many compiled grammars are kept."""
        return len(self._cached)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        llguidance = _llguidance()
        matcher: LLMatcher = llguidance.LLMatcher(self._vocabulary(), grammar_text(params), log_level=0)
        if matcher.is_error():
            raise _invalid(matcher.get_error())
        # That no text satisfies a grammar, or that it is too complex, often shows only at its first mask.
        first = matcher.deep_copy()
        _numpy_masks().fill_next_token_bitmask(first, self._room_for_masks(1))
        if first.is_error():
            reason = first.get_error().split(maxsplit=1)[0]  # what follows is the state of the parser
            raise _invalid(f"no text satisfies it, or it is too complex ({reason})")
        return matcher

    def _room_for_masks(self, count: int) -> npt.NDArray[np.int32]:
        room: npt.NDArray[np.int32] = _numpy_masks().allocate_token_bitmask(
            count, self._vocabulary().vocab_size
        )
        return room

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            llguidance = _llguidance()
            tokenizer = self._load_tokenizer()
            if tokenizer is None:
                raise ValueError("structured_outputs needs a tokenizer: do without skip_tokenizer_init")
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise ValueError(
                    "structured_outputs needs a fast tokenizer (tokenizer.json), and this is none"
                )
            eos = self._eos_token_ids or [tokenizer.eos_token_id]
            if eos == [None]:
                raise ValueError("structured_outputs needs an EOS token, and this model has none")
            size = max(self._vocab_size, 1 + max(tokenizer.get_vocab().values()))
            self._tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=eos)
        return self._tokenizer


def check_grammar(params: StructuredOutputsParams) -> None:
    """Checks a grammar without a tokenizer.

    Raises:
        ValueError: it is wrong, or there is no llguidance.
    """
    message = _llguidance().LLMatcher.validate_grammar(grammar_text(params))
    if message and not message.startswith("WARNING"):
        raise _invalid(message)


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance takes it."""
    matcher = _llguidance().LLMatcher
    if params.json is not None or params.json_object:
        flexible: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
        options = {"whitespace_flexible": False} if params.disable_any_whitespace else flexible
        schema = '{"type": "object"}' if params.json is None else params.json
        return str(matcher.grammar_from_json_schema(schema, overrides=options))
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return str(matcher.grammar_from_lark(f"start: {texts}"))
    return str(matcher.grammar_from_lark(params.grammar))


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            "structured_outputs needs llguidance: pip install 'pagedinfer[structured]'"
        ) from error
    return llguidance


def _numpy_masks() -> Any:
    return import_module("llguidance.numpy")


def _invalid(message: str) -> ValueError:
    first = " ".join(message.split())[:300]
    return ValueError(f"structured_outputs: the grammar cannot be used: {first}")
