"""Prompts as users give them to token ids, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from pagedinfer.config import unknown_option_message
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.unicode_text import check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextPrompt(TypedDict, total=False):
    """A prompt as text. It shares KV through the prefix cache only with prompts of the same `cache_salt`."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is its text, if known, for the output alone."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt that can be given to the scheduler."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


class InputProcessor:
    """Checks and tokenizes prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def process(self, prompt: Prompt) -> ProcessedPrompt:
        """One prompt: a string, {"prompt": str}, {"prompt_token_ids": [...]}, or a list of token ids.

        Raises:
            ValueError: a prompt of another form, one without tokens, a token id outside the vocabulary,
                or text where there is no tokenizer.
        """
        if isinstance(prompt, str):
            return ProcessedPrompt(prompt, self._encode(prompt))
        if isinstance(prompt, Mapping):
            return self._process_mapping(prompt)
        return ProcessedPrompt(None, self._check_ids(prompt))

    def process_all(self, prompts: Prompt | Sequence[Prompt]) -> list[ProcessedPrompt]:
        """One prompt or a list of them; the message of an error says which of them is wrong."""
        if isinstance(prompts, str | Mapping):
            return [self.process(prompts)]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise ValueError(f"prompts must be a prompt or a list of prompts, got {_short(prompts)}")
        if prompts and isinstance(prompts[0], Integral):  # one prompt, as a bare list of token ids
            return [self.process(prompts)]
        processed = []
        for i, prompt in enumerate(prompts):
            try:
                processed.append(self.process(prompt))  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"prompt {i} of {len(prompts)}: {error}") from None
        return processed

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of these texts, each at the beginning of a text and after a space.

        Raises:
            ValueError: there is no tokenizer, or a text without tokens.
        """
        if not words:
            return ()
        if self._tokenizer is None:
            raise ValueError("bad_words needs a tokenizer; without one, logit_bias can ban token ids")
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                check_unicode("bad_words", text)
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if not token_ids:
                    raise ValueError(f"bad_words must hold texts that have tokens, got {word!r}")
                sequences[token_ids] = None
        return tuple(sequences)

    def _process_mapping(self, prompt: Mapping[str, Any]) -> ProcessedPrompt:
        known = {"prompt", "prompt_token_ids", "cache_salt"}
        for key in prompt:
            if key not in known:
                raise ValueError(unknown_option_message("a prompt", str(key), known))
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"'prompt' must be a string, got {_short(text)}")
        salt = prompt.get("cache_salt", "")
        if not isinstance(salt, str):
            raise ValueError(f"'cache_salt' must be a string, got {_short(salt)}")
        check_unicode("'cache_salt'", salt)
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is not None:
            return ProcessedPrompt(text, self._check_ids(token_ids), salt)
        if text is None:
            raise ValueError("a prompt must have 'prompt' or 'prompt_token_ids', and has neither")
        return ProcessedPrompt(text, self._encode(text), salt)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(
                "a prompt given as text needs a tokenizer: give {'prompt_token_ids': [...]}, or do without "
                "skip_tokenizer_init"
            )
        check_unicode("the prompt", text)
        token_ids: list[int] = self._tokenizer.encode(text)
        if not token_ids:
            raise ValueError("the prompt is empty: it must have at least one token")
        return token_ids

    def _check_ids(self, token_ids: Any) -> list[int]:
        if hasattr(token_ids, "tolist"):  # an array or a tensor
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            raise ValueError(f"a prompt's token ids must be a list, got {_short(token_ids)}")
        if not token_ids:
            raise ValueError("the prompt is empty: it must have at least one token")
        plain = set(map(type, token_ids)) == {int}  # as mostly, and then nothing is done one by one
        wrong = []
        if not plain:
            wrong = [x for x in token_ids if type(x) is bool or not isinstance(x, Integral)]
        if not wrong and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            wrong = [x for x in token_ids if not 0 <= x < self._vocab_size]
        if wrong:
            raise ValueError(
                f"a prompt's token ids must be integers in [0, {self._vocab_size}), the vocabulary, got "
                f"{_short(wrong[0])}"
            )
        return list(token_ids) if plain else list(map(int, token_ids))


def num_known_tokens(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """One more than the largest id that the tokenizer knows; None: there is none to ask."""
    if tokenizer is None:
        return None
    largest: int = max(tokenizer.get_vocab().values())
    return largest + 1


def truncate(prompt: ProcessedPrompt, params: SamplingParams, max_model_len: int) -> ProcessedPrompt:
    """The prompt without its first tokens, as `params.truncate_prompt_tokens` says."""
    limit = params.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == -1:
        limit = max(1, max_model_len - (params.max_tokens or 1))
    return replace(prompt, token_ids=prompt.token_ids[-limit:])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
