"""What stands between the network and the routes: keys, sizes, names of requests. Plain ASGI."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedinfer.server.api_errors import ApiError

_LONGEST_NAME = 128
_OPEN_PATH = "/health"


class ApiKeys:
    """Refuses requests without one of the keys, but for /health. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._may_pass(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            error = ApiError(
                401,
                "a valid API key is needed, as the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Scope) -> bool:
        if get_route_path(scope) == _OPEN_PATH:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Refuses bodies that are too large, before they are read if they say so, and while they are if not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        if b"content-length" in headers or b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        # Of unknown length: it is collected here, as far as it may go.
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            413,
            f"the body is larger than {self._max_bytes} bytes",
            code="body_too_large",
            headers={"connection": "close"},
        )
        await error.response()(scope, receive, send)


def request_name(scope: Scope, given: str | None = None) -> str:
    """The id of a request: what its client calls it, or a new one.

    Args:
        given: in the body; the header X-Request-Id wins.

    Raises:
        ApiError: the client's is too long, or holds what no id should.
    """
    headers = [value for name, value in scope["headers"] if name == b"x-request-id"]
    name = headers[0].decode("latin-1") if headers else given
    if name is None:
        return secrets.token_hex(16)
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{_LONGEST_NAME}}}", name):
        raise ApiError(
            400,
            f"a request's id must have 1 to {_LONGEST_NAME} visible ASCII characters",
            param="request_id",
        )
    return name
