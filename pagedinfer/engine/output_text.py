"""The text of one choice, from its tokens to what may be shown. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedinfer.engine.detokenizer import Detokenizer
from pagedinfer.engine.stop_strings import StopStrings
from pagedinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OutputText:
    """Decodes a choice's tokens and looks for its stop strings. Text once shown is never taken back.

    Args:
        tokenizer: of the model.
        params: read here are `stop`, `include_stop_str_in_output`, `min_tokens` and `skip_special_tokens`.
        defer: decode at the end, all at once; for who does not look at the text before. Stop strings
            are looked for with every token all the same.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams, *, defer: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._include_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._deferred: list[int] | None = [] if defer and not params.stop_strings else None
        self.text = ""
        """What may be shown."""
        self.num_tokens = 0
        """Tokens taken in; those beyond the one that completed a stop string are not."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text. The request is then to be ended with it as stop_reason."""
        return self._stops.found

    def append(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> None:
        """Takes in the next tokens.

        Args:
            token_ids: nothing may come after a stop string was found.
            ended_by_token: whether the last one is EOS or a stop token; its text is shown only if
                `include_stop_str_in_output` says so.
        """
        visible = list(token_ids)
        if ended_by_token and not self._include_stop_token:
            visible.pop()
        if self._deferred is not None:
            self._deferred += visible
            self.num_tokens += len(token_ids)
            return
        for token_id in visible:
            self.num_tokens += 1
            honour = self.num_tokens > self._min_tokens
            self.text += self._stops.append(self._detokenizer.append([token_id]), honour=honour)
            if self.stop_string is not None:
                return
        self.num_tokens += len(token_ids) - len(visible)

    def finish(self) -> None:
        """Shows what was held back. Harmless when repeated, and after a stop string."""
        if self.stop_string is not None:
            return
        if self._deferred is not None:
            self.text += self._detokenizer.append(self._deferred)
            self._deferred = []
        rest = self._detokenizer.finish()
        self.text += self._stops.append(rest, honour=False) + self._stops.finish()
