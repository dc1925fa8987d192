"""From what the scheduler says of each step to what users get: texts, reasons, times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagedinfer.engine.batch import AdmittedRequest
from pagedinfer.engine.detokenizer import Detokenizer
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import RequestUpdate
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
        detokenizer: Detokenizer | None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.output_kind = output_kind
        self.detokenizer = detokenizer
        self.text = ""
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.num_shown_tokens = 0
        self.num_shown_characters = 0
        self.metrics = RequestMetrics(arrival_time=request.arrival_time, queued_ts=time.monotonic())

    def append(self, update: RequestUpdate, now: float) -> None:
        """Takes in a step's tokens."""
        if not update.new_token_ids:
            return
        self.token_ids += update.new_token_ids
        self.cumulative_logprob += sum(update.logprobs)
        metrics = self.metrics
        if not metrics.first_token_ts:
            metrics.first_token_ts = now
            metrics.first_token_latency = now - metrics.queued_ts
        metrics.last_token_ts = now
        metrics.num_generation_tokens = len(self.token_ids)
        if self.detokenizer is not None and self.output_kind is not RequestOutputKind.FINAL_ONLY:
            self.text += self.detokenizer.append(update.new_token_ids)

    def finish(self, now: float) -> None:
        """Completes the text and the times."""
        self.metrics.finished_ts = now
        self.metrics.num_preemptions = self.request.num_preemptions
        if self.detokenizer is None:
            return
        if self.output_kind is RequestOutputKind.FINAL_ONLY:
            self.text = self.detokenizer.append(self.token_ids)
        self.text += self.detokenizer.finish()

    def output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput:
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
                    finish_reason=finish_reason,
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
        wanted = self._tokenizer is not None and request.sampling_params.detokenize
        detokenizer = Detokenizer(self._tokenizer) if wanted else None
        self._states[request.request_id] = _RequestState(request, prompt, output_kind, detokenizer)

    def note_scheduled(self, admitted: Iterable[AdmittedRequest]) -> None:
        """Keeps the time at which each request was scheduled first."""
        for each in admitted:
            metrics = self._states[each.request_id].metrics
            metrics.scheduled_ts = metrics.scheduled_ts or time.monotonic()

    def process(self, updates: Iterable[RequestUpdate]) -> list[RequestOutput]:
        """The outputs of a step, in the order of its updates."""
        now = time.monotonic()
        outputs = []
        for update in updates:
            state = self._states[update.request_id]
            state.append(update, now)
            if update.finish_reason is not None:
                state.finish(now)
                del self._states[update.request_id]
            elif state.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            outputs.append(state.output(update.finish_reason, update.stop_reason))
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request's output as it is; None if there is none (any more)."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        state.finish(time.monotonic())
        return state.output("abort", None)

    def clear(self) -> None:
        """Forgets all requests."""
        self._states.clear()
