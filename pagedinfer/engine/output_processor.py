"""From what the scheduler says of each step to what users get: texts, reasons, times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pagedinfer.engine.batch import AdmittedRequest, BestTokens
from pagedinfer.engine.choice_state import ChoiceState
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.logprob_maker import LogprobMaker
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.request_update import TopTokens
from pagedinfer.engine.scheduler import RequestUpdate, Scheduler
from pagedinfer.outputs import Logprob, RequestMetrics, RequestOutput
from pagedinfer.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOT_SAMPLED = (
    "no token could be sampled: the model's logits held NaN or infinities (the weights or the dtype's range "
    "may be at fault), or the request's parameters leave no token to draw"
)


class _RequestState:
    """The choices of one request of a user, and its times."""

    def __init__(
        self, choices: list[ChoiceState], prompt: ProcessedPrompt, output_kind: RequestOutputKind
    ) -> None:
        self.choices = choices
        self.prompt = prompt
        self.output_kind = output_kind
        self.news: list[ChoiceState] = []  # choices to which the step under way gave something
        self.num_unfinished = len(choices)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if choices[0].request.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt.token_ids)
        self.metrics = RequestMetrics(
            arrival_time=choices[0].request.arrival_time, queued_ts=time.monotonic()
        )

    @property
    def request_id(self) -> str:
        return self.choices[0].request.request_id

    def output(self, now: float) -> RequestOutput | None:
        """What the user gets after a step; None: nothing yet."""
        news, self.news = self.news, []
        finished = self.num_unfinished == 0
        if finished:
            self.metrics.finished_ts = now
            self.metrics.num_generation_tokens = sum(
                choice.request.num_output_tokens for choice in self.choices
            )
            self.metrics.num_preemptions = sum(choice.request.num_preemptions for choice in self.choices)
            self.metrics.num_cached_tokens = self.choices[0].request.num_cached_tokens
        if self.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        shown = news if self.output_kind is RequestOutputKind.DELTA else self.choices
        prompt_logprobs = self.prompt_logprobs
        if self.output_kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None
        failed = any(choice.finish_reason == "error" for choice in self.choices)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[choice.output() for choice in shown],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.choices[0].request.num_cached_tokens,
            error=_NOT_SAMPLED if failed else None,
        )


class OutputProcessor:
    """Holds the state of every unfinished request's output."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._logprob_maker = LogprobMaker(tokenizer)
        self._states: dict[str, _RequestState] = {}
        self._choices: dict[str, tuple[_RequestState, ChoiceState]] = {}  # by the scheduler's ids

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id has a choice that goes on."""
        return request_id in self._states

    def add(
        self,
        request: Request,
        prompt: ProcessedPrompt,
        output_kind: RequestOutputKind,
        further_choices: Sequence[Request] = (),
    ) -> None:
        """Begins a request's output; its id is that of its first choice."""
        choices = [
            ChoiceState(i, choice, output_kind, self._tokenizer, self._logprob_maker)
            for i, choice in enumerate((request, *further_choices))
        ]
        state = _RequestState(choices, prompt, output_kind)
        self._states[request.request_id] = state
        for choice in choices:
            self._choices[choice.request.request_id] = state, choice

    def note_scheduled(self, admitted: Iterable[AdmittedRequest]) -> None:
        """Keeps the time at which each request was scheduled first."""
        for each in admitted:
            metrics = self._choices[each.request_id][0].metrics
            metrics.scheduled_ts = metrics.scheduled_ts or time.monotonic()

    def note_prompts(self, prompts: Mapping[str, tuple[int, BestTokens]]) -> None:
        """Takes in what a step found of prompts; see `StepOutput.prompts`."""
        for request_id, (first, best) in prompts.items():
            state = self._states.get(request_id)
            if state is None or state.prompt_logprobs is None:
                continue  # aborted, or a further choice, whose prompt has been rated already
            for row, logprob in enumerate(best.logprobs.tolist()):
                token_id = state.prompt.token_ids[first + row]
                top = TopTokens.of_row(best, row, best.top_ids.shape[1])
                state.prompt_logprobs[first + row] = self._logprob_maker.make(token_id, logprob, top)

    def process(self, updates: Iterable[RequestUpdate], scheduler: Scheduler) -> list[RequestOutput]:
        """The outputs of a step, in the order of its updates. A stop string ends its request here."""
        now = time.monotonic()
        touched: dict[str, _RequestState] = {}
        for update in updates:
            state, choice = self._choices[update.request_id]
            if update.new_token_ids:
                state.metrics.note_tokens_at(now)
                state.metrics.num_generation_tokens += len(update.new_token_ids)
            if choice.append(update):
                scheduler.finish_request(
                    update.request_id, RequestStatus.FINISHED_STOPPED, choice.stop_reason
                )
            if choice.finish_reason is not None:
                state.num_unfinished -= 1
                del self._choices[update.request_id]
            state.news.append(choice)
            touched[state.request_id] = state
        outputs = [
            output for output in (state.output(now) for state in touched.values()) if output is not None
        ]
        for request_id, state in touched.items():
            if state.num_unfinished == 0:
                del self._states[request_id]
        return outputs

    def abort(self, request_id: str, scheduler: Scheduler) -> RequestOutput | None:
        """Ends a request, and its output as it is; None if there is none (any more)."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        for choice in state.choices:
            if choice.finish_reason is None:
                scheduler.abort_request(choice.request.request_id)
                choice.finish("abort")
                del self._choices[choice.request.request_id]
                state.news.append(choice)
        state.num_unfinished = 0
        return state.output(time.monotonic())

    def stop_choice(self, request_id: str, index: int, scheduler: Scheduler) -> bool:
        """Ends one choice as a stop string would; True: the request has ended with it. No output tells."""
        state = self._states.get(request_id)
        if state is None:
            return False
        choice = state.choices[index]
        if choice.finish_reason is None:
            scheduler.finish_request(choice.request.request_id, RequestStatus.FINISHED_STOPPED)
            choice.finish("stop")
            del self._choices[choice.request.request_id]
            state.num_unfinished -= 1
        if state.num_unfinished == 0:
            del self._states[request_id]
        return state.num_unfinished == 0

    def drop(self, ids: Iterable[str], scheduler: Scheduler) -> list[str]:
        """Ends the requests that have one of these scheduler's ids, with all their choices.

        Returns:
            Their own ids. No output tells of them.
        """
        lost = set(ids)
        dropped = [
            request_id
            for request_id, state in self._states.items()
            if any(choice.request.request_id in lost for choice in state.choices)
        ]
        for request_id in dropped:
            for choice in self._states.pop(request_id).choices:
                self._choices.pop(choice.request.request_id, None)
                scheduler.abort_request(choice.request.request_id)
        return dropped

    def clear(self) -> list[str]:
        """Forgets all requests; returns their ids."""
        forgotten = list(self._states)
        self._states.clear()
        self._choices.clear()
        return forgotten
