"""What the answers of both kinds of completion have in common."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.responses import Response

from pagedinfer.errors import RequestFailedError
from pagedinfer.outputs import RequestOutput
from pagedinfer.server.api_errors import invalid
from pagedinfer.server.completion_logprobs import finite
from pagedinfer.server.request_models import SamplingBody
from pagedinfer.server.response_models import PromptLogprob, PromptLogprobs, Usage

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


def usage_options(body: SamplingBody) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether every chunk has it.

    Raises:
        ApiError: options of a stream for what is none.
    """
    options = body.stream_options
    if options is None:
        return False, False
    if not body.stream:
        raise invalid("stream_options needs stream=true", param="stream_options")
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def check_output(output: RequestOutput) -> None:
    """Raises RequestFailedError if no token could be drawn."""
    if output.error is not None:
        raise RequestFailedError(output.error)


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs:
    """Those of a prompt, as clients get them."""
    return [
        None
        if entry is None
        else {
            token_id: PromptLogprob(finite(found.logprob), found.rank, found.decoded_token)
            for token_id, found in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]
