"""Sends requests to a server and takes the times of what comes back."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from pagedinfer.cli.http_client import ServerUrl
from pagedinfer.cli.load.workload import Workload
from pagedinfer.parameter_checks import integer, real

_MOST_REGULAR = 1e9  # burstiness: requests that come like a clock's ticks


@dataclass(slots=True)
class Result:
    """How one request went. Times are seconds."""

    sent_at: float = 0.0
    ttft: float = 0.0  # to the first token
    latency: float = 0.0  # to the end
    itl: list[float] = field(default_factory=list)  # between tokens that follow each other
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""


async def run_load(
    workload: Workload,
    *,
    base_url: str,
    endpoint: str,
    api_key: str | None = None,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    num_warmups: int = 1,
) -> tuple[list[Result], float]:
    """The results in the order of the requests, and how long all of it took.

    Args:
        workload: what to ask for.
        base_url, endpoint, api_key: of the server.
        request_rate: requests a second; infinite: as soon as may be.
        burstiness: shape of the gamma distribution of the gaps between them; 1: a Poisson process.
        max_concurrency: the most requests at once; None: no limit.
        num_warmups: requests that are sent and awaited before.

    Raises:
        ValueError: a parameter is out of its range; the message names its flag.
    """
    real("--request-rate", request_rate, 0.0, math.inf, low_open=True)
    real("--burstiness", burstiness, 0.0, _MOST_REGULAR, low_open=True)
    if max_concurrency is not None:
        integer("--max-concurrency", max_concurrency, 1)
    integer("--num-warmups", num_warmups, 0)
    bodies = list(workload.bodies())
    target = _Target(base_url, endpoint, api_key)
    for body in bodies[:num_warmups]:
        await target.ask(body)
    places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    rng = random.Random(workload.seed)

    async def ask(body: dict[str, Any]) -> Result:
        async with AsyncExitStack() as stack:
            if places is not None:
                await stack.enter_async_context(places)
            return await target.ask(body)

    started = time.perf_counter()
    tasks = []
    due = started
    for body in bodies:
        if request_rate != math.inf:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += rng.gammavariate(burstiness, 1.0 / (request_rate * burstiness))
        tasks.append(asyncio.create_task(ask(body)))
    results = await asyncio.gather(*tasks)
    return list(results), time.perf_counter() - started


class _Target:
    """A server, to which every request has a connection of its own."""

    def __init__(self, base_url: str, endpoint: str, api_key: str | None) -> None:
        self._url = url = ServerUrl.parse(base_url)
        self._head = f"POST {url.prefix}{endpoint} HTTP/1.1\r\n"
        self._head += f"Host: {url.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def ask(self, body: dict[str, Any]) -> Result:
        """Sends a request and reads its stream to the end."""
        result = Result(sent_at=time.perf_counter())
        try:
            await self._ask(body, result)
        except (OSError, EOFError, ValueError, KeyError) as error:
            result.error = f"{type(error).__name__}: {error}"
        return result

    async def _ask(self, body: dict[str, Any], result: Result) -> None:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(
            self._url.host, self._url.port, ssl=self._url.is_tls or None
        )
        try:
            writer.write(f"{self._head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            last = result.sent_at
            done = False
            async for event in _events(reader):
                if event == b"[DONE]":
                    done = True
                    break
                now = time.perf_counter()
                message = json.loads(event)
                if "error" in message:
                    raise ValueError(message["error"].get("message", message["error"]))
                if message.get("choices"):
                    if result.ttft:
                        result.itl.append(now - last)
                    else:
                        result.ttft = now - result.sent_at
                    last = now
                if message.get("usage"):
                    result.num_prompt_tokens = message["usage"]["prompt_tokens"]
                    result.num_output_tokens = message["usage"]["completion_tokens"]
            if not done:
                raise EOFError("the stream ended before [DONE]")
            result.latency = last - result.sent_at
        finally:
            writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of the events of a response in chunks."""
    status = await reader.readline()
    headers = b""
    while (line := await reader.readline()) not in (b"\r\n", b""):
        headers += line.lower()
    if b" 200 " not in status:
        raise ValueError(f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')}")
    if b"transfer-encoding: chunked" not in headers:
        raise ValueError("the server does not stream")
    held = b""
    while size := int(await reader.readline(), 16):
        held += (await reader.readexactly(size + 2))[:-2]
        while (end := held.find(b"\n\n")) >= 0:
            event, held = held[:end], held[end + 2 :]
            if event.startswith(b"data: "):
                yield event[6:]
