"""Log-probabilities as users get them, from what a step found. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedinfer.engine.request_update import TopTokens
from pagedinfer.outputs import Logprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LogprobMaker:
    """Makes the entry of one position, with the texts of its tokens.

    Args:
        tokenizer: None: there are no texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def make(self, token_id: int, logprob: float, top: TopTokens) -> dict[int, Logprob]:
        """By token id, with falling log-probability: the best ones, and `token_id` if it is not of them."""
        entry = {
            top_id: Logprob(top_logprob, rank, self._text(top_id))
            for rank, (top_id, top_logprob) in enumerate(
                zip(top.token_ids, top.logprobs, strict=True), start=1
            )
        }
        if token_id not in entry:
            entry[token_id] = Logprob(logprob, top.rank, self._text(token_id))
        return entry

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            self._texts[token_id] = text
        return text
