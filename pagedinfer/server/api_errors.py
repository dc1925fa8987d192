"""Errors as clients get them: {"error": {"message", "type", "param", "code"}}, with the right status."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response

from pagedinfer.errors import EngineDeadError, QueueFullError, RequestFailedError, RequestTooLargeError
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.vllm_names import hint

_RETRY_AFTER_SECONDS = 1
_LONGEST_MESSAGE = 2000
_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} | {"prompt", "messages", "tools"}


class ApiError(Exception):
    """What goes wrong with a request, to be told to its client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """As JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return encode_json({"error": error})

    def response(self) -> Response:
        """As a response."""
        return Response(
            self.body(), status_code=self.status, headers=self.headers, media_type="application/json"
        )


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """A 503 that says when to come again."""
    return ApiError(503, message, headers={"retry-after": str(_RETRY_AFTER_SECONDS)})


def api_error_of(error: BaseException) -> ApiError:
    """What a client is told of an exception. That of an unexpected one is not its business."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return unavailable(str(error))
    if isinstance(error, RequestTooLargeError):
        return invalid(str(error), code="context_length_exceeded")
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, RequestFailedError):
        return ApiError(500, f"the engine failed on this request: {error}", code="engine_error")
    if isinstance(error, ValueError):
        return invalid(str(error), param=_param_of(str(error)))
    return ApiError(500, "an unexpected error; the server's log has it")


def validation_error(
    errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None, content_type: str = ""
) -> ApiError:
    """What pydantic has against a body, as a 400 that names the field.

    Args:
        errors: pydantic's.
        model: of the body, if there is one.
        content_type: the request's.
    """
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]  # a misspelt name explains one that is missing
    path = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if not path and content_type and "json" not in content_type.lower():  # as curl's -d says by default
        return invalid(
            f"the body is taken for {content_type[:100]!r}: send the header Content-Type: application/json"
        )
    param = str(path[0]) if path and first["type"] != "json_invalid" else None
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return invalid(f"the body is not valid JSON: {reason}")
    if first["type"] == "extra_forbidden" and param is not None:
        known = sorted(model.model_fields) if model is not None else []
        return invalid(f"there is no parameter {param[:100]!r}{hint(param, known)}", param=param[:100])
    message = str(first["msg"])
    if first["type"] == "missing" and param is not None:
        message = "is missing"
    name = param or "the body"
    return invalid(f"{name}: {message[:1].lower()}{message[1:]}", param=param and param[:100])


def encode_json(value: Any) -> bytes:
    """JSON of anything that we answer, and of texts that are no valid Unicode too."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, from the client's own JSON
        import json

        return json.dumps(value).encode("ascii")


def _param_of(message: str) -> str | None:
    """The parameter that an error of ours begins with, as they do."""
    match = re.match(r"(\w+)\b", message)
    return match[1] if match is not None and match[1] in _FIELDS else None
