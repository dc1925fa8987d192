"""Log-probabilities in the form of /v1/completions: texts, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedinfer.engine.detokenizer import Detokenizer
from pagedinfer.outputs import Logprob
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.server.response_models import CompletionLogprobs
from pagedinfer.server.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LogprobTexts:
    """The tokens of one text as they come, as pieces that join to it.

    A token that ends inside a character has the empty piece; the one that completes it has the character.

    Args:
        offset: where the text begins in what the client gets.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        token_bytes: TokenBytes,
        params: SamplingParams,
        offset: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._token_bytes = token_bytes
        self.offset = offset

    def add(
        self,
        token_ids: Sequence[int],
        entries: Sequence[dict[int, Logprob] | None],
        *,
        last: bool = False,
        hide_last: bool = False,
    ) -> CompletionLogprobs:
        """What is said about these tokens.

        Args:
            token_ids, entries: as they follow each other; an entry is None for a prompt's first token.
            last: no tokens come after these.
            hide_last: the last of them is not in the text: a stop token.
        """
        found = CompletionLogprobs([], [], [], [])
        for i, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
            is_last = last and i == len(token_ids) - 1
            piece = "" if is_last and hide_last else self._detokenizer.append([token_id])
            if is_last:
                piece += self._detokenizer.finish()
            found.tokens.append(piece)
            found.text_offset.append(self.offset)
            self.offset += len(piece)
            found.token_logprobs.append(None if entry is None else finite(entry[token_id].logprob))
            found.top_logprobs.append(None if entry is None else self._top(entry))
        return found

    def _top(self, entry: dict[int, Logprob]) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in entry.items():
            data = self._token_bytes.of(token_id)
            try:
                name = data.decode()
            except UnicodeDecodeError:  # a part of a character; as OpenAI shows it
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            top.setdefault(name or f"token_id:{token_id}", finite(logprob.logprob))
        return top


def finite(logprob: float) -> float:
    """JSON has no infinities; this is as good as one."""
    return max(logprob, -9999.0)


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """One after the other."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
