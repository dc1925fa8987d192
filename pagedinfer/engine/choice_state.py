"""What has been generated for one choice of a request, and what its user has seen of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pagedinfer.engine.detokenizer import Detokenizer
from pagedinfer.engine.logprob_maker import LogprobMaker
from pagedinfer.engine.request import Request
from pagedinfer.engine.request_update import RequestUpdate
from pagedinfer.engine.stop_strings import StopStrings
from pagedinfer.outputs import CompletionOutput, FinishReason, Logprob
from pagedinfer.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChoiceState:
    """Tokens, text and end of one choice.

    Args:
        index: which of the request's choices it is.
        request: as the scheduler has it.
        output_kind: what its outputs hold.
        tokenizer: None: there is no text.
        logprob_maker: makes the log-probabilities, if the request wants them.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        output_kind: RequestOutputKind,
        tokenizer: PreTrainedTokenizerBase | None,
        logprob_maker: LogprobMaker | None = None,
    ) -> None:
        params = request.sampling_params
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self._output_kind = output_kind
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._stop_strings = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        # Text that nobody looks at before the end is made at the end.
        self._text_at_end = output_kind is RequestOutputKind.FINAL_ONLY and not params.stop_strings
        self._text = ""
        self._cumulative_logprob = 0.0
        self._logprob_maker = logprob_maker
        self._logprobs: list[dict[int, Logprob]] = []
        self._num_shown_tokens = 0
        self._num_shown_characters = 0

    def append(self, update: RequestUpdate) -> bool:
        """Takes in what a step gave. True: a stop string has ended the choice, which was to go on."""
        new_token_ids = update.new_token_ids
        self._take(new_token_ids, update.logprobs)
        if update.top is not None and self._logprob_maker is not None:
            self._logprobs.append(self._logprob_maker.make(new_token_ids[0], update.logprobs[0], update.top))
        if self._detokenizer is not None and not self._text_at_end:
            self._append_text(self._detokenizer.append(self._visible(new_token_ids, update.finish_reason)))
        stop_string = self._stop_strings.found
        if stop_string is not None:
            self.finish("stop", stop_string)
            return update.finish_reason is None
        if update.finish_reason is not None:
            self.finish(update.finish_reason, update.stop_reason)
        return False

    def finish(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """Ends the choice and completes its text."""
        self._take(*self.request.take_unreported())
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._detokenizer is None or self._stop_strings.found is not None:
            return
        if self._text_at_end:
            self._append_text(self._detokenizer.append(self._visible(self.token_ids, finish_reason)))
        self._append_text(self._detokenizer.finish())
        self._text += self._stop_strings.finish()
        if self._stop_strings.found is not None and finish_reason in ("stop", "length"):
            self.finish_reason, self.stop_reason = "stop", self._stop_strings.found

    def _take(self, token_ids: list[int], logprobs: list[float]) -> None:
        self.token_ids += token_ids
        self._cumulative_logprob += sum(logprobs)

    def output(self) -> CompletionOutput:
        """What the user gets now."""
        text, token_ids, logprobs = self._text, self.token_ids, self._logprobs
        if self._output_kind is RequestOutputKind.DELTA:
            text, token_ids = text[self._num_shown_characters :], token_ids[self._num_shown_tokens :]
            logprobs = logprobs[self._num_shown_tokens :]
            self._num_shown_characters, self._num_shown_tokens = len(self._text), len(self.token_ids)
        elif self.finish_reason is None:
            token_ids, logprobs = token_ids.copy(), logprobs.copy()
        rated = self.request.sampling_params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob if rated else None,
            logprobs=logprobs if rated else None,
            finish_reason=cast("FinishReason | None", self.finish_reason),
            stop_reason=self.stop_reason,
        )

    def _visible(self, token_ids: list[int], finish_reason: str | None) -> list[int]:
        """Without the stop token that has ended the request, unless it is wanted in the text."""
        hidden = finish_reason == "stop" and not self.request.sampling_params.include_stop_str_in_output
        return token_ids[:-1] if hidden else token_ids

    def _append_text(self, text: str) -> None:
        min_tokens = self.request.sampling_params.min_tokens
        honour = min_tokens == 0 or len(self.token_ids) > min_tokens  # as for a stop token
        self._text += self._stop_strings.append(text, honour=honour)
