"""The streams of one HTTP request, which may bring several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.outputs import RequestOutput
from pagedinfer.sampling_params import RequestOutputKind, SamplingParams
from pagedinfer.server.async_engine import AsyncEngine
from pagedinfer.server.request_stream import RequestStream
from pagedinfer.server.response_models import PromptTokensDetails, Usage


class StreamGroup:
    """Submits all prompts or none, and gives their outputs as they come.

    Args:
        engine: works on them.
        prompts, params, priority, output_kind: as `AsyncEngine.submit` takes them.
        counts_tokens: False: what is drawn is not shown, and the usage does not count it.

    Raises:
        As `AsyncEngine.submit`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[ProcessedPrompt],
        params: SamplingParams,
        output_kind: RequestOutputKind,
        priority: int = 0,
        *,
        counts_tokens: bool = True,
    ) -> None:
        self._engine = engine
        self._counts_tokens = counts_tokens
        self.streams: list[RequestStream] = []
        self._wake = asyncio.Event()
        engine.check_queue(len(prompts))
        try:
            for prompt in prompts:
                stream = engine.submit(prompt, params, priority=priority, output_kind=output_kind)
                stream.wake = self._wake
                self.streams.append(stream)
        except BaseException:
            self.abort()
            raise

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt's index, output), until all have finished; whatever has not is aborted at the end.

        Raises:
            As `RequestStream.take`.
        """
        pending = list(enumerate(self.streams))
        try:
            while pending:
                await self._wake.wait()
                self._wake.clear()
                finished = False
                for index, stream in pending:
                    if stream.has_news:
                        finished |= stream.finished
                        yield index, stream.take()
                if finished:
                    pending = [(i, stream) for i, stream in pending if stream.has_news or not stream.finished]
                    if any(stream.has_news for _, stream in pending):
                        self._wake.set()
        finally:
            self.abort()

    @contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """Ends what has not finished if the block raises, before or after `outputs` was begun."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Ends what has not finished."""
        for stream in self.streams:
            self._engine.abort_stream(stream)

    def usage(self) -> Usage:
        """The tokens so far."""
        num_prompt_tokens = sum(len(stream.prompt.token_ids) for stream in self.streams)
        num_tokens = sum(stream.num_tokens for stream in self.streams) if self._counts_tokens else 0
        cached = sum(stream.num_cached_tokens for stream in self.streams)
        return Usage(
            num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens, PromptTokensDetails(cached)
        )
