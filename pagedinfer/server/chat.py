"""/v1/chat/completions: a conversation in, the next message out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from pagedinfer.outputs import CompletionOutput, Logprob, RequestOutput
from pagedinfer.sampling_params import RequestOutputKind
from pagedinfer.server.answers import AnswerHead, check_output, chunk_events, prompt_logprobs, usage_options
from pagedinfer.server.api_errors import invalid
from pagedinfer.server.chat_tools import ToolUse
from pagedinfer.server.completion_logprobs import finite
from pagedinfer.server.completions import start_stream
from pagedinfer.server.event_stream import unless_gone
from pagedinfer.server.parsing.pieces import Call, Content, Parser, Piece, Reasoning
from pagedinfer.server.request_models import ChatBody
from pagedinfer.server.response_models import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from pagedinfer.server.service import Service
from pagedinfer.server.stream_group import StreamGroup
from pagedinfer.server.structured import response_constraint
from pagedinfer.server.token_bytes import TokenBytes


async def create_chat_completion(service: Service, body: ChatBody, receive: Receive, name: str) -> Response:
    """Answers a request; `name` is its id."""
    service.check_ready()
    model = service.check_model(body.model)
    head = AnswerHead(
        f"chatcmpl-{name}", model, "chat.completion.chunk" if body.stream else "chat.completion"
    )
    usage = usage_options(body)
    if body.chat_template is not None:
        raise invalid("chat_template is not supported: templates are the server's", param="chat_template")
    if body.modalities not in (None, [], ["text"]):
        raise invalid(
            f'modalities must be ["text"], since this model writes text; got {body.modalities!r:.40}',
            param="modalities",
        )
    tools = ToolUse(body)
    constraint = response_constraint(body, tools)
    params = service.sampling_params(
        body,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=_num_logprobs(body),
        structured_outputs=constraint,
    )
    priority = service.priority(body)
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = await service.chat_prompt(
        [_with_parsed_arguments(message) for message in body.messages],
        cache_salt=body.cache_salt,
        add_generation_prompt=_adds_generation_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        tools=tools.for_template,
        template_kwargs=template_kwargs,
    )
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    group = StreamGroup(service.engine, [prompt], params, kind, priority)
    makers = [
        _ChoiceMaker(
            service,
            body,
            tools,
            service.parsers.parser(
                prompt.text or "",
                tools.callable,
                forced=tools.forced,
                required=tools.required,
                constrained=constraint is not None,
            ),
        )
        for _ in range(params.n)
    ]

    def make(index: int, output: RequestOutput, part: CompletionOutput) -> ChatChunkChoice:
        return makers[part.index].chunk(part)

    with group.aborted_on_error():
        if body.stream:
            return await start_stream(receive, chunk_events(group, head, usage, make), name)
        return await unless_gone(receive, _whole(group, makers, head, body))


async def _whole(
    group: StreamGroup, makers: Sequence[_ChoiceMaker], head: AnswerHead, body: ChatBody
) -> Response:
    last: RequestOutput | None = None
    async for _, output in group.outputs():
        check_output(output)
        last = output
    assert last is not None
    choices = [makers[part.index].choice(part) for part in last.outputs]
    answer = ChatCompletion(head.id, head.created, head.model, choices, group.usage())
    if body.prompt_logprobs is not None and last.prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs(last.prompt_logprobs)
    if body.return_token_ids:
        answer.prompt_token_ids = last.prompt_token_ids
    return head.response(answer)


class _ChoiceMaker:
    """Makes a choice, or its parts one after the other, from the engine's outputs."""

    def __init__(self, service: Service, body: ChatBody, tools: ToolUse, parser: Parser) -> None:
        self._service = service
        self._parser = parser
        self._wants_logprobs = bool(body.logprobs)
        self._num_top = body.top_logprobs or 0
        self._wants_ids = bool(body.return_token_ids)
        self._shows_reasoning = body.include_reasoning is not False
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self._tools = tools
        self._num_calls = 0
        self._is_first = True

    def choice(self, part: CompletionOutput) -> ChatChoice:
        """The whole choice."""
        pieces = self._pieces(part)
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        message = ChatMessage(content=content if content or not calls else None)
        if reasoning:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = [
                ToolCall(_call_id(), FunctionCall(call.name, call.arguments)) for call in calls
            ]
        choice = ChatChoice(
            index=part.index,
            message=message,
            logprobs=self._logprobs(part),
            finish_reason=self._finish_reason(part) or "stop",
            stop_reason=part.stop_reason,
        )
        if self._wants_ids:
            choice.token_ids = part.token_ids
        return choice

    def chunk(self, part: CompletionOutput) -> ChatChunkChoice:
        """What is new of it."""
        delta = ChatDelta()
        if self._is_first:
            delta.role = "assistant"
            self._is_first = False
        content, reasoning = "", ""
        calls: list[ToolCallDelta] = []
        for piece in self._pieces(part):
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, Reasoning):
                reasoning += piece.text
            else:
                function = FunctionCallDelta(piece.arguments, piece.name)
                calls.append(ToolCallDelta(0, function, id=_call_id(), type="function"))
        if content or (not reasoning and not calls and part.finish_reason is None):
            delta.content = content
        if reasoning:
            delta.reasoning_content = reasoning
        if calls:
            for position, call in enumerate(calls):
                call.index = self._num_calls - len(calls) + position
            delta.tool_calls = calls
        choice = ChatChunkChoice(part.index, delta, self._logprobs(part), self._finish_reason(part))
        if part.finish_reason is not None:
            choice.stop_reason = part.stop_reason
        if self._wants_ids:
            choice.token_ids = part.token_ids
        return choice

    def _pieces(self, part: CompletionOutput) -> list[Piece]:
        pieces = self._parser.feed(part.text)
        if part.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        shown: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Call):
                if self._max_calls is not None and self._num_calls >= self._max_calls:
                    continue
                self._num_calls += 1
            if self._shows_reasoning or not isinstance(piece, Reasoning):
                shown.append(piece)
        return shown

    def _finish_reason(self, part: CompletionOutput) -> str | None:
        if part.finish_reason == "stop" and self._num_calls and self._tools.forced is None:
            return "tool_calls"
        return part.finish_reason

    def _logprobs(self, part: CompletionOutput) -> ChatLogprobs | None:
        if not self._wants_logprobs or part.logprobs is None:
            return None
        token_bytes = self._service.token_bytes
        return ChatLogprobs(
            [
                _token_logprob(token_id, entry, self._num_top, token_bytes)
                for token_id, entry in zip(part.token_ids, part.logprobs, strict=True)
            ]
        )


def _token_logprob(
    token_id: int, entry: dict[int, Logprob], num_top: int, token_bytes: TokenBytes
) -> TokenLogprob:
    top = [
        TopLogprob(token_bytes.text(best_id), finite(best.logprob), list(token_bytes.of(best_id)))
        for best_id, best in list(entry.items())[:num_top]
    ]
    return TokenLogprob(
        token_bytes.text(token_id), finite(entry[token_id].logprob), list(token_bytes.of(token_id)), top
    )


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise invalid(f"top_logprobs must not be negative, got {body.top_logprobs}", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _adds_generation_prompt(body: ChatBody) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have arguments as objects, which templates print as they need them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("a tool call needs a function with a name", param="messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # A model may have written anything; what is no JSON the template gets as it is.
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments) if arguments.strip() else {}
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": parsed}
