"""Text from tokens as they come, never to be taken back. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WINDOW = 4
_LONGEST_WAIT = 16
_UNSETTLED = 3  # a character of UTF-8 has at most four bytes: so many tokens may yet become one


class Detokenizer:
    """The text of one sequence of generated tokens, a piece with each token.

    A token's text depends on its neighbours: a character may be spread over several tokens, and a leading
    space is dropped at the start of a text. So a window of the last tokens is decoded together, and what it
    gives beyond what it gave before is new. Text that ends in U+FFFD may be a character still incomplete,
    and waits until it is complete, cannot be any more, or `finish` is called.

    The pieces add up to what the tokenizer gives for all tokens at once. There is one exception. Where a run
    of byte-fallback tokens is not valid UTF-8, a full decode gives U+FFFD for every byte of the run; here the
    characters that are complete before the first wrong byte stay what they are.

    The prompt has no part in this: its last character may be incomplete, and stays so.

    Args:
        tokenizer: of transformers; the text is that of its backend, without clean-up of spaces.
        skip_special_tokens: leave special tokens out.
        spaces_between_special_tokens: put spaces between special tokens. Only tokenizers without a backend
            (those written in Python) do either; the others put what their decoder says.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._window: list[int] = []
        self._shown = ""  # of the window's text, what has been given out
        self._clean = 0  # how many tokens of the window ended with nothing left to wait

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add; empty while a character is incomplete."""
        if len(token_ids) > 1:
            text = self._decode([*self._window, *token_ids])
            if text.startswith(self._shown) and _REPLACEMENT not in text:  # then nothing had to wait
                new = text[len(self._shown) :]
                self._window += token_ids
                self._accept(text)
                return new
        return "".join(map(self._append, token_ids))

    def finish(self) -> str:
        """The rest: incomplete characters, as the tokenizer shows them."""
        if self._clean == len(self._window):
            return ""
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            text = self._forget_clean()
        rest = text[len(self._shown) :]
        self._window, self._shown, self._clean = [], "", 0
        return rest

    def _append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._shown and self._is_invisible(token_id):
            self._window.pop()
            return ""
        if text.endswith(_REPLACEMENT):
            return self._settle(text) if len(self._window) - self._clean > _LONGEST_WAIT else ""
        if not text.startswith(self._shown):
            text = self._forget_clean()
        new = text[len(self._shown) :]
        if new:
            self._accept(text)
        return new

    def _accept(self, text: str) -> None:
        """All of the window has been shown; keeps it short, but the last piece as context."""
        self._shown = text
        if len(self._window) > _LONGEST_WINDOW:
            del self._window[: self._clean]
            self._shown = self._decode(self._window)
        self._clean = len(self._window)

    def _forget_clean(self) -> str:
        """A byte made the whole run before it invalid, some of it shown already: starts at that byte."""
        del self._window[: self._clean]
        self._shown, self._clean = "", 0
        return self._decode(self._window)

    def _settle(self, text: str) -> str:
        """Gives out what has waited too long to become anything else, and shortens the window."""
        if not text.startswith(self._shown):
            text = self._forget_clean()
        new = text[len(self._shown) : -_UNSETTLED]
        self._shown += new
        for length in range(_LONGEST_WINDOW, _LONGEST_WAIT):
            tail = self._decode(self._window[-length:])
            gone = len(text) - len(tail)
            if text.endswith(tail) and gone <= len(self._shown):
                self._window = self._window[-length:]
                self._shown = self._shown[gone:]
                self._clean = 0
                break
        return new

    def _is_invisible(self, token_id: int) -> bool:
        """Whether the token never has a text: a special one that is skipped, or an id that is none."""
        if not self._tokenizer.convert_ids_to_tokens(token_id):
            return True
        if not self._skip_special_tokens:
            return False
        return not self._decode([token_id]) and bool(self._decode([token_id], skip=False))

    def _decode(self, token_ids: list[int], *, skip: bool | None = None) -> str:
        if skip is None:
            skip = self._skip_special_tokens
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip)
            return text
        return self._tokenizer.decode(  # type: ignore[no-any-return]
            token_ids,
            skip_special_tokens=skip,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=self._spaces,
        )
