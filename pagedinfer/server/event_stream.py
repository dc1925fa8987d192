"""Answers that come in events, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagedinfer.logging import get_logger
from pagedinfer.server.api_errors import api_error_of

logger = get_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client has closed its connection before its answer was there."""


class EventStream(Response):
    """Sends events as they come, and ends their iterator as soon as the client is gone.

    What the iterator raises reaches the client as an event with the error, before the last one.

    Args:
        first: the first event. It is there when the headers are sent, so that whatever goes wrong before
            has a status of its own.
        events: the others, each as "data: ...\\n\\n". The end, [DONE], is sent here.
        headers: more headers.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._first = first
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            for task in (sender, gone):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await sender
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body: Message = {"type": "http.response.body", "body": self._first, "more_body": True}
        try:
            await send(body)
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            api_error = api_error_of(error)
            if api_error.code is None and api_error.status == 500:
                logger.exception("a stream failed")
            await send({**body, "body": b"data: " + api_error.body() + b"\n\n"})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled if the client goes away before.

    Raises:
        ClientGoneError: that happened.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
