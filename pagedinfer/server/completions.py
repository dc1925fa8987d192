"""/v1/completions: prompts in, continuations out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive

from pagedinfer.engine.detokenizer import Detokenizer
from pagedinfer.outputs import CompletionOutput, RequestOutput
from pagedinfer.sampling_params import RequestOutputKind, SamplingParams
from pagedinfer.server.answers import AnswerHead, check_output, chunk_events, prompt_logprobs, usage_options
from pagedinfer.server.api_errors import invalid
from pagedinfer.server.completion_logprobs import LogprobTexts, join
from pagedinfer.server.event_stream import EventStream, unless_gone
from pagedinfer.server.request_models import CompletionBody
from pagedinfer.server.response_models import Completion, CompletionChoice, CompletionLogprobs
from pagedinfer.server.service import Service
from pagedinfer.server.stream_group import StreamGroup
from pagedinfer.server.structured import response_constraint

if TYPE_CHECKING:
    from pagedinfer.server.request_stream import RequestStream


async def create_completion(service: Service, body: CompletionBody, receive: Receive, name: str) -> Response:
    """Answers a request; `name` is its id."""
    service.check_ready()
    head = AnswerHead(f"cmpl-{name}", service.check_model(body.model), "text_completion")
    usage = usage_options(body)
    if body.suffix is not None:
        raise invalid("suffix is not supported", param="suffix")
    if body.best_of not in (None, body.n or 1):
        raise invalid("best_of is not supported, unless it is n", param="best_of")
    prompts = await service.prompts(
        body.prompt, add_special_tokens=body.add_special_tokens is not False, cache_salt=body.cache_salt
    )
    score_only = body.max_tokens == 0 and bool(body.echo)  # a token is drawn and not shown
    prompt_rated = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = service.sampling_params(
        body.model_copy(update={"max_tokens": 1}) if score_only else body,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_rated,
        structured_outputs=response_constraint(body),
    )
    if score_only:
        params = replace(params, stop=None, min_tokens=0)
    if len(prompts) * params.n > service.settings.max_prompts:
        raise invalid(
            f"the prompts times n must be at most {service.settings.max_prompts}, got {len(prompts)} times "
            f"{params.n}",
            param="n",
        )
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    priority = service.priority(body)
    group = StreamGroup(service.engine, prompts, params, kind, priority, counts_tokens=not score_only)
    makers = [
        _ChoiceMaker(service, body, params, stream, p * params.n + i, score_only)
        for p, stream in enumerate(group.streams)
        for i in range(params.n)
    ]

    def make(index: int, output: RequestOutput, part: CompletionOutput) -> CompletionChoice:
        return makers[index * params.n + part.index].make(part)

    with group.aborted_on_error():
        if body.stream:
            return await start_stream(receive, chunk_events(group, head, usage, make), name)
        return await unless_gone(receive, _whole(group, makers, params.n, head))


async def start_stream(receive: Receive, events: AsyncGenerator[bytes, None], name: str) -> EventStream:
    """The response, once there is a first event: what goes wrong before has a status of its own."""
    first = await unless_gone(receive, _next(events))
    return EventStream(first, events, {"x-request-id": name})


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _whole(group: StreamGroup, makers: list[_ChoiceMaker], n: int, head: AnswerHead) -> Response:
    choices: dict[int, CompletionChoice] = {}
    async for index, output in group.outputs():
        check_output(output)
        for part in output.outputs:
            maker = makers[index * n + part.index]
            choices[maker.index] = maker.make(part)
    ordered = [choices[maker.index] for maker in makers]
    return head.response(Completion(head.id, head.created, head.model, ordered, group.usage()))


class _ChoiceMaker:
    """Makes a choice, or its parts one after the other, from the engine's outputs."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        params: SamplingParams,
        stream: RequestStream,
        index: int,
        score_only: bool,
    ) -> None:
        self.index = index
        self._service = service
        self._params = params
        self._stream = stream
        self._prompt = stream.prompt
        self._echo = bool(body.echo)
        self._score_only = score_only
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._wants_ids = bool(body.return_token_ids)
        self._wants_logprobs = body.logprobs is not None
        self._texts: LogprobTexts | None = None
        self._is_first = True

    def make(self, part: CompletionOutput) -> CompletionChoice:
        finished = part.finish_reason is not None
        text, token_ids, logprobs = part.text, part.token_ids, None
        if self._score_only:
            text, token_ids = "", []
        if self._wants_logprobs:
            logprobs = self._logprobs(part, finished)
        prefix = ""
        if self._is_first and self._echo:
            prefix = self._echoed()
        choice = CompletionChoice(
            index=self.index,
            text=prefix + text,
            logprobs=logprobs,
            finish_reason="length" if self._score_only and finished else part.finish_reason,
            stop_reason=None if self._score_only else part.stop_reason,
        )
        if self._wants_ids:
            choice.token_ids = token_ids
            if self._is_first:
                choice.prompt_token_ids = self._prompt.token_ids
        if self._wants_prompt_logprobs and self._is_first:
            choice.prompt_logprobs = prompt_logprobs(self._stream.prompt_logprobs or ())
        self._is_first = False
        return choice

    def _echoed(self) -> str:
        """The prompt as text; what its log-probabilities' pieces join to, if they are given."""
        text = self._prompt.text
        if text is not None and not self._wants_logprobs and self._params.truncate_prompt_tokens is None:
            return text
        detokenizer = Detokenizer(
            self._service.tokenizer,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )
        return detokenizer.append(self._prompt.token_ids) + detokenizer.finish()

    def _logprobs(self, part: CompletionOutput, finished: bool) -> CompletionLogprobs:
        found = CompletionLogprobs([], [], [], [])
        if self._texts is None:
            offset = 0
            if self._echo:
                of_prompt = self._new_texts(0)
                found = of_prompt.add(self._prompt.token_ids, self._stream.prompt_logprobs or [], last=True)
                offset = of_prompt.offset
            self._texts = self._new_texts(offset)
        if self._score_only:
            return found
        hidden = part.finish_reason == "stop" and not isinstance(part.stop_reason, str)
        hidden = hidden and not self._params.include_stop_str_in_output
        new = self._texts.add(part.token_ids, part.logprobs or [], last=finished, hide_last=hidden)
        return join(found, new)

    def _new_texts(self, offset: int) -> LogprobTexts:
        return LogprobTexts(self._service.tokenizer, self._service.token_bytes, self._params, offset)
