"""One request in flight, in the process that has its text: tokens in as they come, outputs out on demand."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pagedinfer.engine.choice_state import ChoiceState
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.logprob_maker import LogprobMaker
from pagedinfer.engine.request import Request
from pagedinfer.engine.request_update import RequestUpdate, TopTokens
from pagedinfer.outputs import Logprob, RequestMetrics, RequestOutput
from pagedinfer.sampling_params import RequestOutputKind
from pagedinfer.server import messages as wire

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestStream:
    """Collects what the engine sends for a request; `next` waits for it.

    Whoever reads slowly gets more at a time: what came between two reads is one output.

    Args:
        number: what the engine calls it, and its first choice; choice i goes by this plus i.
        request: its id, prompt and parameters.
        prompt: as it was given.
        output_kind: what `next` returns, as in SamplingParams.output_kind.
        tokenizer: None: there is no text.
        logprob_maker: makes log-probabilities with the tokens' texts.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        prompt: ProcessedPrompt,
        output_kind: RequestOutputKind,
        tokenizer: PreTrainedTokenizerBase | None,
        logprob_maker: LogprobMaker,
    ) -> None:
        self.number = number
        self.request = request
        self.prompt = prompt
        self.output_kind = output_kind
        self.choices = [
            ChoiceState(index, request, output_kind, tokenizer, logprob_maker)
            for index in range(request.sampling_params.n)
        ]
        self.metrics = RequestMetrics(arrival_time=request.arrival_time, queued_ts=time.monotonic())
        self.num_cached_tokens = 0
        self.error: BaseException | None = None
        self.finished = False
        self.num_tokens = 0  # generated, of all choices
        self.last_token_at = 0.0
        """When a token was last received here, on the monotonic clock; 0: none has been yet."""
        self._logprob_maker = logprob_maker
        self._num_unfinished = len(self.choices)
        self._news: dict[int, ChoiceState] = {}
        self._not_sampled: str | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        """For each token of the prompt, once its first choice has a token; None if nobody asked for them."""
        self._prompt_logprobs_are_new = False
        self.wake = asyncio.Event()
        """Set when there is something to `take`; several streams may share one."""
        self.has_news = False

    @property
    def choice_numbers(self) -> range:
        """What the engine calls its choices."""
        return range(self.number, self.number + len(self.choices))

    def apply_token(self, index: int, token_id: int) -> bool:
        """Takes in the next token of a choice. True: a stop string has ended it here, not in the engine."""
        choice = self.choices[index]
        if choice.finish_reason is not None:  # the engine had not heard yet
            return False
        self.num_tokens += 1
        stopped = choice.append(RequestUpdate(self.request, 0, [token_id], []))
        self._note_news(choice)
        self._wake_reader()
        return stopped

    def apply(self, delta: wire.RequestDelta) -> list[int]:
        """Takes in what a step gave; the choices that a stop string has ended here, not in the engine."""
        self.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if found is None else self._logprob(found) for found in delta.prompt_logprobs
            ]
            self._prompt_logprobs_are_new = True
        if delta.error is not None:
            self._not_sampled = delta.error
        stopped = []
        for part in delta.choices:
            choice = self.choices[part.index]
            if choice.finish_reason is not None:  # the engine had not heard yet
                continue
            self.num_tokens += len(part.token_ids)
            if self._append(choice, part):
                stopped.append(part.index)
            self._note_news(choice)
        if delta.times is not None:
            metrics, times = self.metrics, delta.times
            metrics.scheduled_ts, metrics.first_token_ts = times.scheduled, times.first_token
            metrics.last_token_ts = times.last_token
            metrics.num_preemptions = delta.num_preemptions
        self._wake_reader()
        return stopped

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, which `next` raises."""
        if not self.finished:
            self.error = error
            self._finish()

    def abort(self) -> None:
        """Ends it as it is."""
        if self.finished:
            return
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish("abort")
                self._news[choice.index] = choice
        self._num_unfinished = 0
        self._finish()

    async def next(self) -> RequestOutput:
        """What there is since the last call, once there is something; raises as `take`."""
        while not self.has_news:
            await self.wake.wait()
            self.wake.clear()
        return self.take()

    def take(self) -> RequestOutput:
        """What there is since the last call; an error comes after the tokens before it.

        Raises:
            EngineDeadError, RequestFailedError: the request has been lost.
            RequestTooLargeError, ValueError: the engine has refused it.
        """
        is_delta = self.output_kind is RequestOutputKind.DELTA
        self.has_news = False
        if self.error is not None:
            if not is_delta or not self._news:
                raise self.error
            self.has_news = True
        news = [self._news.pop(index) for index in sorted(self._news)]
        shown = news if is_delta else self.choices
        tells_prompt = self._prompt_logprobs_are_new or not is_delta
        self._prompt_logprobs_are_new = False
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[choice.output() for choice in shown],
            finished=self.finished and self.error is None,
            prompt_logprobs=self.prompt_logprobs if tells_prompt else None,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=self._not_sampled,
        )

    def _append(self, choice: ChoiceState, part: wire.ChoiceDelta) -> bool:
        if part.logprobs is None:
            update = RequestUpdate(self.request, 0, part.token_ids, [], part.finish_reason, part.stop_reason)
            return choice.append(update)
        last = len(part.token_ids) - 1
        for i, (token_id, found) in enumerate(zip(part.token_ids, part.logprobs, strict=True)):
            update = RequestUpdate(self.request, 0, [token_id], [found[0].logprob], top=_top(found))
            if i == last:
                update.finish_reason, update.stop_reason = part.finish_reason, part.stop_reason
            if choice.append(update):
                return True
        if last < 0 and part.finish_reason is not None:
            choice.finish(part.finish_reason)
        return False

    def _note_news(self, choice: ChoiceState) -> None:
        if choice.finish_reason is not None:
            self._num_unfinished -= 1
        self._news[choice.index] = choice

    def _wake_reader(self) -> None:
        if self._num_unfinished == 0:
            self._finish()
        elif self.output_kind is not RequestOutputKind.FINAL_ONLY:
            self.has_news = True
            self.wake.set()

    def _logprob(self, found: list[wire.TokenLogprob]) -> dict[int, Logprob]:
        return self._logprob_maker.make(found[0].token_id, found[0].logprob, _top(found))

    def _finish(self) -> None:
        self.finished = True
        self.metrics.finished_ts = time.monotonic()
        self.metrics.num_generation_tokens = self.num_tokens
        self.metrics.num_cached_tokens = self.num_cached_tokens
        if self.metrics.first_token_ts:
            self.metrics.first_token_latency = self.metrics.first_token_ts - self.metrics.queued_ts
        self.has_news = True
        self.wake.set()


def _top(found: list[wire.TokenLogprob]) -> TopTokens:
    best = found[1:]
    return TopTokens(found[0].rank, [each.token_id for each in best], [each.logprob for each in best])
