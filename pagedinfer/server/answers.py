"""What the answers of both kinds of completion have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from pagedinfer.errors import RequestFailedError
from pagedinfer.outputs import CompletionOutput, Logprob, RequestOutput
from pagedinfer.server.api_errors import invalid
from pagedinfer.server.completion_logprobs import finite
from pagedinfer.server.request_models import SamplingBody
from pagedinfer.server.response_models import PromptLogprob, PromptLogprobs, Usage
from pagedinfer.server.stream_group import StreamGroup

_encoder = msgspec.json.Encoder()


class AnswerHead:
    """What every chunk of an answer repeats, encoded once."""

    def __init__(self, id: str, model: str, kind: str) -> None:
        self.id = id
        self.model = model
        self.created = int(time.time())
        head = {"id": id, "object": kind, "created": self.created, "model": model}
        self._prefix = b"data: " + _encoder.encode(head)[:-1] + b',"choices":['

    def chunk(self, choice: Any, usage: Usage | msgspec.UnsetType | None = msgspec.UNSET) -> bytes:
        """An event with one choice; a usage of None is null, an unset one is not there."""
        if usage is msgspec.UNSET:
            return b"".join((self._prefix, _encoder.encode(choice), b"]}\n\n"))
        encoded = _encoder.encode(usage)
        return b"".join((self._prefix, _encoder.encode(choice), b'],"usage":', encoded, b"}\n\n"))

    def last_chunk(self, usage: Usage) -> bytes:
        """The event with the usage and no choices."""
        return b"".join((self._prefix, b'],"usage":', _encoder.encode(usage), b"}\n\n"))

    def response(self, answer: Any) -> Response:
        """The whole answer."""
        headers = {"x-request-id": self.id.partition("-")[2]}
        return Response(_encoder.encode(answer), media_type="application/json", headers=headers)


class UsageOptions(NamedTuple):
    """What a stream says of its usage."""

    at_end: bool
    on_all: bool
    """On every chunk, as far as it has come."""


async def chunk_events(
    group: StreamGroup,
    head: AnswerHead,
    usage: UsageOptions,
    make: Callable[[int, RequestOutput, CompletionOutput], Any],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; `make` makes a choice from its prompt's index and what the engine gave.

    Raises:
        As `StreamGroup.outputs`.
    """
    unset = None if usage.at_end else msgspec.UNSET
    async for index, output in group.outputs():
        check_output(output)
        for part in output.outputs:
            choice = make(index, output, part)
            yield head.chunk(choice, group.usage() if usage.on_all else unset)
    if usage.at_end:
        yield head.last_chunk(group.usage())


def usage_options(body: SamplingBody) -> UsageOptions:
    """Those of a request.

    Raises:
        ApiError: options of a stream for what is none.
    """
    options = body.stream_options
    if options is None:
        return UsageOptions(False, False)
    if not body.stream:
        raise invalid("stream_options needs stream=true", param="stream_options")
    return UsageOptions(bool(options.include_usage), bool(options.continuous_usage_stats))


def check_output(output: RequestOutput) -> None:
    """Raises RequestFailedError if no token could be drawn."""
    if output.error is not None:
        raise RequestFailedError(output.error)


def prompt_logprobs(entries: Iterable[dict[int, Logprob] | None]) -> PromptLogprobs:
    """Those of a prompt, as clients get them."""
    return [
        None
        if entry is None
        else {
            token_id: PromptLogprob(finite(found.logprob), found.rank, found.decoded_token)
            for token_id, found in entry.items()
        }
        for entry in entries
    ]
