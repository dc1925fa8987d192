"""AsyncEngine: an engine in a process of its own, whose requests are async streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING

from pagedinfer.config import EngineConfig
from pagedinfer.engine.garbage import FrozenGarbage
from pagedinfer.engine.grammars import check_grammar
from pagedinfer.engine.input_processor import InputProcessor, ProcessedPrompt, Prompt, truncate
from pagedinfer.engine.logprob_maker import LogprobMaker
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.engine.size_limits import max_total_tokens
from pagedinfer.errors import (
    EngineDeadError,
    EngineStartError,
    QueueFullError,
    RequestFailedError,
    RequestTooLargeError,
)
from pagedinfer.logging import configure, get_logger
from pagedinfer.outputs import RequestOutput
from pagedinfer.sampling_params import RequestOutputKind, SamplingParams
from pagedinfer.server import messages as wire
from pagedinfer.server.engine_handle import ENGINE_COMMAND, EngineHandle
from pagedinfer.server.engine_observer import EngineObserver
from pagedinfer.server.request_stream import RequestStream
from pagedinfer.server.streams_in_flight import StreamsInFlight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)


class AsyncEngine:
    """Runs an engine in another process, so that nothing here ever holds up a step.

        async with AsyncEngine(EngineConfig(model="path/to/model")) as engine:
            async for output in engine.generate("Hello, my name is", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Prompts are tokenized and texts are made here; the engine's process sees token ids alone. All methods
    belong to one event loop.

    Args:
        config: as for `LLM`.
        max_num_queued_requests: the most requests that wait for a place to run; None: no limit.
        observer: is told what happens, for metrics.
        command: the command line of the engine's process.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_num_queued_requests: int | None = None,
        observer: EngineObserver | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.config = config
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._command = command
        self._handle: EngineHandle | None = None
        self._observer = observer or EngineObserver()
        self._max_num_queued_requests = max_num_queued_requests
        self._limits: wire.EngineLimits | None = None
        self._next_number = 0  # each choice has one of its own
        self._streams = StreamsInFlight()
        self._reader: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._is_ready = False
        self._frozen_garbage: FrozenGarbage | None = None
        self._dead: str | None = None  # why it is
        self._closing = False
        self._num_waiting = 0  # as last reported
        self._num_added = 0  # since then

    # ---- start and end ----

    async def start(self) -> None:
        """Starts the engine and loads the tokenizer; returns when requests can be given.

        Raises:
            EngineStartError: the engine could not start; its message says why.
            ValueError: there is no such model, or no tokenizer that can be loaded.
            DownloadError: the model cannot be fetched from the hub.
        """
        configure()
        config = await asyncio.to_thread(_on_disk, self.config)
        self._handle = EngineHandle(asdict(config), self._command)
        await self._handle.start()
        self._reader = asyncio.create_task(self._read(self._handle))
        if not config.skip_tokenizer_init:
            folder = config.tokenizer or config.model
            self.tokenizer = await asyncio.to_thread(_load_tokenizer, folder)
        await self._started.wait()
        if self._limits is None:
            raise EngineStartError(self._dead)
        limits = self._limits
        self.default_sampling_params = SamplingParams(**limits.default_sampling_params)
        self.input_processor = InputProcessor(self.tokenizer, limits.vocab_size)
        self._logprob_maker = LogprobMaker(self.tokenizer)
        self._scheduler_config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            num_cpu_blocks=limits.num_cpu_blocks,
            max_model_len=limits.max_model_len,
        )
        self._frozen_garbage = FrozenGarbage()  # later collections pass over transformers and the tokenizer
        self._is_ready = True

    async def close(self) -> None:
        """Ends the engine's process; requests in flight fail. Harmless when repeated."""
        self._closing = True
        if self._handle is not None:
            await self._handle.stop()
            if self._reader is not None:
                await self._reader
            self._handle.close()
        if self._frozen_garbage is not None:
            self._frozen_garbage.release()
        self._die("the engine has been closed")

    def kill(self) -> None:
        """Ends the engine's process at once, for when this one is about to end too."""
        if self._handle is not None:
            self._handle.kill()

    async def __aenter__(self) -> AsyncEngine:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def limits(self) -> wire.EngineLimits:
        """What the engine settled on.

        Raises:
            RuntimeError: it has not started.
        """
        if self._limits is None:
            raise RuntimeError("the engine has not started")
        return self._limits

    @property
    def is_ready(self) -> bool:
        """Whether requests can be given: it has started, and is alive."""
        return self._is_ready and self._dead is None

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended."""
        return self._dead is not None

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return None if self._handle is None else self._handle.pid

    async def wait_dead(self) -> None:
        """Returns when the engine's process has ended."""
        if self._reader is not None:
            await asyncio.shield(self._reader)

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt | ProcessedPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Generates for one prompt. A caller who stops iterating aborts the request.

        Args:
            prompt: as `LLM.generate` takes one.
            params: how to sample, by default as the model's generation_config.json says; `output_kind`
                says what each output holds.
            request_id: unique among the unfinished requests; one is made up by default.
            priority: lower is more urgent; looked at under scheduling_policy="priority".

        Raises:
            ValueError: a malformed prompt or parameter.
            RequestTooLargeError: the request can never fit.
            QueueFullError: as many requests wait as may.
            EngineDeadError: the engine's process has ended.
            RequestFailedError: a step with this request failed.
        """
        stream = self.submit(prompt, params, request_id, priority=priority)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self.abort_stream(stream)

    def submit(
        self,
        prompt: Prompt | ProcessedPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
    ) -> RequestStream:
        """Queues a request. Whoever leaves before its stream has finished must call `abort_stream`.

        Raises:
            As `generate`.
        """
        self._check_alive()
        params = params or self.default_sampling_params
        self.check_params(params)
        if not isinstance(prompt, ProcessedPrompt):
            prompt = self.input_processor.process(prompt)
        prompt = truncate(prompt, params, self.limits.max_model_len)
        number = self._next_number
        request = Request(str(number) if request_id is None else request_id, prompt.token_ids, params)
        max_total_tokens(request, self._scheduler_config)
        if self._streams.with_id(request.request_id) is not None:
            raise ValueError(f"there is an unfinished request {request.request_id!r} already")
        self.check_queue()
        stream = RequestStream(
            number,
            request,
            prompt,
            output_kind or params.output_kind,
            self.tokenizer if params.detokenize else None,
            self._logprob_maker,
        )
        self._send(
            wire.AddRequest(
                number, prompt.token_ids, wire.params_to_wire(params), priority, prompt.cache_salt
            )
        )
        self._next_number += params.n
        self._streams.add(stream)
        self._num_added += 1
        self._observer.added(stream)
        return stream

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError if these parameters do not suit the model, or cannot reach the engine."""
        wire.params_to_wire(params)
        params.check_model(self.limits.vocab_size, self.limits.max_logprobs)
        self.input_processor.bad_word_ids(params.bad_words or ())
        if params.structured_outputs is not None:
            check_grammar(params.structured_outputs)

    def check_queue(self, num_requests: int = 1) -> None:
        """Raises QueueFullError if there is no place for so many more requests."""
        limit = self._max_num_queued_requests
        if limit is None:
            return
        free = self.limits.max_num_seqs - len(self._streams)
        queued = max(0, -free)
        if self._num_waiting:  # whoever came after the last report waits behind these
            queued, free = max(queued, self._num_waiting + self._num_added), 0
        free = max(0, free)
        if queued + num_requests - free > limit:
            self._observer.refused()
            raise QueueFullError(
                f"{queued} requests are waiting, and max_num_queued_requests is {limit}; try again later"
            )

    def abort_stream(self, stream: RequestStream) -> None:
        """Ends a request, if it has not finished, and frees all it holds."""
        if not self._streams.remove(stream):
            return
        self._send(wire.AbortRequests([stream.number]))
        stream.abort()
        self._observer.finished(stream)

    def abort(self, request_id: str) -> bool:
        """Ends the request of this id; whoever iterates over it gets a last output. False: there is none."""
        stream = self._streams.with_id(request_id)
        if stream is None:
            return False
        self.abort_stream(stream)
        return True

    def fail_all(self, reason: str) -> None:
        """Ends all requests with a RequestFailedError."""
        self._send(wire.AbortRequests([stream.number for stream in self._streams]))
        for stream in self._streams:
            self._fail(stream, RequestFailedError(reason))

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of earlier prompts."""
        self._send(wire.ResetPrefixCache())

    @property
    def num_unfinished_requests(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    # ---- what the engine says ----

    async def _read(self, handle: EngineHandle) -> None:
        async for message in handle.messages():
            self._take(message)
        code = handle.returncode
        self._die(f"the engine's process (pid {self.pid}) has ended unexpectedly, exit code {code}")

    def _take(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Outputs):
            self._take_outputs(message)
        elif isinstance(message, wire.RequestsFailed):
            for number in message.numbers:
                stream = self._streams.with_choice(number)
                if stream is not None:
                    self._fail(stream, _error(message))
        elif isinstance(message, wire.Ready):
            self._limits = message.limits
            self._observer.started(message.limits)
            self._started.set()
        else:
            self._die(message.message)

    def _take_outputs(self, message: wire.Outputs) -> None:
        if message.stats is not None:
            self._num_waiting = message.stats.num_waiting
            self._num_added = 0
        now = time.monotonic()
        for delta in message.requests:
            stream = self._streams.with_choice(delta.number)
            if stream is None:  # aborted, and the engine had not heard yet
                continue
            num_tokens = stream.num_tokens
            for index in stream.apply(delta):
                self._send(wire.StopChoice(delta.number, index))
            self._note_tokens(stream, stream.num_tokens - num_tokens, now)
        for number, token_id in message.tokens.unpack():
            stream = self._streams.with_choice(number)
            if stream is None:
                continue
            num_tokens = stream.num_tokens
            index = number - stream.number
            if stream.apply_token(index, token_id):
                self._send(wire.StopChoice(stream.number, index))
            self._note_tokens(stream, stream.num_tokens - num_tokens, now)
        self._observer.step(message)

    def _note_tokens(self, stream: RequestStream, count: int, now: float) -> None:
        """So many have come, and it may have ended with them."""
        self._observer.tokens(stream, count, now)
        if stream.finished:
            self._streams.remove(stream)
            self._observer.finished(stream)

    def _fail(self, stream: RequestStream, error: BaseException) -> None:
        self._streams.remove(stream)
        stream.fail(error)
        self._observer.finished(stream)

    def _die(self, reason: str) -> None:
        if self._dead is None:
            self._dead = reason
            if not self._closing:
                logger.error("%s", reason)
        for stream in self._streams:
            self._fail(stream, EngineDeadError(self._dead))
        self._observer.died()
        self._started.set()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if not self._is_ready:
            raise RuntimeError("the engine has not started")

    def _send(self, message: wire.ToEngine) -> None:
        if self._handle is not None:
            self._handle.send(message)


def _on_disk(config: EngineConfig) -> EngineConfig:
    """The same with folders for names of the hub; what is not there is fetched."""
    from pagedinfer.models.hub import fetch_model, fetch_tokenizer

    model = fetch_model(config)
    tokenizer = None
    if config.tokenizer is not None and not config.skip_tokenizer_init:
        tokenizer = str(fetch_tokenizer(config, model))
    return replace(config, model=str(model), tokenizer=tokenizer, hf_token=None)


def _load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    from pagedinfer.engine.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def _error(message: wire.RequestsFailed) -> Exception:
    kinds: dict[str, type[Exception]] = {"too_large": RequestTooLargeError, "invalid": ValueError}
    return kinds.get(message.kind, RequestFailedError)(message.message)
