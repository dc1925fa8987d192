"""From what the scheduler says of each step to what users get: texts, reasons, times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from pagedinfer.engine.batch import AdmittedRequest
from pagedinfer.engine.detokenizer import Detokenizer
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.scheduler import RequestUpdate, Scheduler
from pagedinfer.engine.stop_strings import StopStrings
from pagedinfer.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from pagedinfer.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOT_SAMPLED = (
    "no token could be sampled: the model's logits held NaN or infinities; the weights or the dtype's range "
    "may be at fault"
)


class _RequestState:
    """What has been generated for one request, and what its user has seen of it."""

    def __init__(
        self,
        request: Request,
        prompt: ProcessedPrompt,
        output_kind: RequestOutputKind,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.prompt = prompt
        self.output_kind = output_kind
        self.detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.stop_strings = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        # Text that nobody looks at before the end is made at the end.
        self.text_at_end = output_kind is RequestOutputKind.FINAL_ONLY and not params.stop_strings
        self.text = ""
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.num_shown_tokens = 0
        self.num_shown_characters = 0
        self.metrics = RequestMetrics(arrival_time=request.arrival_time, queued_ts=time.monotonic())

    def append(self, update: RequestUpdate, now: float) -> None:
        """Takes in a step's tokens."""
        new_token_ids = update.new_token_ids
        if not new_token_ids:
            return
        self.token_ids += new_token_ids
        self.cumulative_logprob += sum(update.logprobs)
        metrics = self.metrics
        if not metrics.first_token_ts:
            metrics.first_token_ts = now
            metrics.first_token_latency = now - metrics.queued_ts
        metrics.last_token_ts = now
        metrics.num_generation_tokens = len(self.token_ids)
        if self.detokenizer is not None and not self.text_at_end:
            self._append_text(self.detokenizer.append(self._visible(new_token_ids, update.finish_reason)))

    @property
    def found_stop_string(self) -> str | None:
        """The stop string in the text, if one has come."""
        return self.stop_strings.found

    def finish(self, finish_reason: str, now: float) -> None:
        """Completes the text and the times."""
        self.metrics.finished_ts = now
        self.metrics.num_preemptions = self.request.num_preemptions
        if self.detokenizer is None:
            return
        if self.text_at_end:
            self._append_text(self.detokenizer.append(self._visible(self.token_ids, finish_reason)))
        if self.stop_strings.found is None:
            self._append_text(self.detokenizer.finish())
        if self.stop_strings.found is None:
            self.text += self.stop_strings.finish()

    def _visible(self, token_ids: list[int], finish_reason: str | None) -> list[int]:
        """Without the stop token that has ended the request, unless it is wanted in the text."""
        stopped = finish_reason == "stop" and self.stop_strings.found is None
        hidden = stopped and not self.request.sampling_params.include_stop_str_in_output
        return token_ids[:-1] if hidden else token_ids

    def _append_text(self, text: str) -> None:
        min_tokens = self.request.sampling_params.min_tokens
        self.text += self.stop_strings.append(text, honour=len(self.token_ids) >= min_tokens)

    def output(self, finish_reason: str | None, stop_reason: int | str | None) -> RequestOutput:
        """What the user gets now."""
        text, token_ids = self.text, self.token_ids
        if self.output_kind is RequestOutputKind.DELTA:
            text, token_ids = text[self.num_shown_characters :], token_ids[self.num_shown_tokens :]
            self.num_shown_characters, self.num_shown_tokens = len(self.text), len(self.token_ids)
        elif finish_reason is None:
            token_ids = token_ids.copy()
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=text,
                    token_ids=token_ids,
                    cumulative_logprob=self.cumulative_logprob,
                    finish_reason=cast("FinishReason | None", finish_reason),
                    stop_reason=stop_reason,
                )
            ],
            finished=finish_reason is not None,
            metrics=self.metrics,
            num_cached_tokens=self.request.num_cached_tokens,
            error=_NOT_SAMPLED if finish_reason == "error" else None,
        )


class OutputProcessor:
    """Holds the state of every unfinished request's output."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    def add(self, request: Request, prompt: ProcessedPrompt, output_kind: RequestOutputKind) -> None:
        """Begins a request's output."""
        self._states[request.request_id] = _RequestState(request, prompt, output_kind, self._tokenizer)

    def note_scheduled(self, admitted: Iterable[AdmittedRequest]) -> None:
        """Keeps the time at which each request was scheduled first."""
        for each in admitted:
            metrics = self._states[each.request_id].metrics
            metrics.scheduled_ts = metrics.scheduled_ts or time.monotonic()

    def process(self, updates: Iterable[RequestUpdate], scheduler: Scheduler) -> list[RequestOutput]:
        """The outputs of a step, in the order of its updates. A stop string ends its request here."""
        now = time.monotonic()
        outputs = []
        for update in updates:
            state = self._states[update.request_id]
            state.append(update, now)
            finish_reason, stop_reason = update.finish_reason, update.stop_reason
            if state.found_stop_string is not None:
                if finish_reason is None:
                    scheduler.finish_request(
                        update.request_id, RequestStatus.FINISHED_STOPPED, state.found_stop_string
                    )
                finish_reason, stop_reason = "stop", state.found_stop_string
            if finish_reason is not None:
                state.finish(finish_reason, now)
                del self._states[update.request_id]
            elif state.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            outputs.append(state.output(finish_reason, stop_reason))
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request's output as it is; None if there is none (any more)."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        state.finish("abort", time.monotonic())
        return state.output("abort", None)

    def clear(self) -> None:
        """Forgets all requests."""
        self._states.clear()
