"""From an engine's steps to the streams of another process: nothing is lost, repeated or mixed up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pagedinfer import EngineConfig, SamplingParams
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.logprob_maker import LogprobMaker
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler, SchedulerConfig
from pagedinfer.engine.stats import SchedulerCounters
from pagedinfer.engine.streamed_tokens import StreamedTokens
from pagedinfer.errors import RequestFailedError
from pagedinfer.outputs import CompletionOutput, Logprob, RequestOutput
from pagedinfer.sampling_params import RequestOutputKind
from pagedinfer.server import messages as wire
from pagedinfer.server.async_engine import AsyncEngine
from pagedinfer.server.engine_process import EngineLoop
from pagedinfer.server.request_stream import RequestStream

LARGEST_TOKEN = 2**31 - 1
decode = msgspec.msgpack.Decoder(wire.FromEngine).decode


@dataclass
class Choice:
    """Of a request: what each step is to give it, and what it has been given."""

    news: list[str]  # of each step: "token", "stop", "length", or "" for nothing
    drawn: list[tuple[int, int]] = field(default_factory=list)  # (step, token)
    finish_reason: Any = None


@dataclass
class Planned:
    """A request."""

    number: int
    choices: list[Choice]
    rated: bool  # with log-probabilities
    aborted: int | None  # before the outputs of this step are taken in
    fails: int | None  # in this step

    def is_over(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)


class PlannedEngine:
    """Gives what is planned, as an `LLMEngine` does: what merely goes on in columns, all else in outputs."""

    def __init__(self, requests: list[Planned], num_steps: int) -> None:
        self.requests = requests
        self.num_steps = num_steps
        self.step_number = -1
        self.failed_request_ids: list[str] = []
        self.stats = Scheduler(SchedulerConfig(num_blocks=1, max_model_len=16)).stats

    def has_unfinished_requests(self) -> bool:
        return True

    def step(self, streamed: StreamedTokens) -> list[RequestOutput]:
        self.step_number += 1
        failing = [request for request in self.requests if request.fails == self.step_number]
        if failing:
            self.failed_request_ids = [str(request.number) for request in failing]
            raise RuntimeError("a step that fails")
        outputs = []
        for request in self.requests:
            if request.is_over() or (request.fails is not None and request.fails < self.step_number):
                continue
            news = [self.draw(request, index, streamed) for index in range(len(request.choices))]
            told = [choice for choice in news if choice is not None]
            if told:
                outputs.append(
                    RequestOutput(str(request.number), None, [1], told, finished=request.is_over())
                )
        return outputs

    def draw(self, request: Planned, index: int, streamed: StreamedTokens) -> CompletionOutput | None:
        choice = request.choices[index]
        news = choice.news[self.step_number]
        if choice.finish_reason or not news:
            return None
        token = LARGEST_TOKEN - 5000 * self.step_number - request.number % 1000 - index
        choice.drawn.append((self.step_number, token))
        if news == "token" and not request.rated and len(choice.drawn) > 1:
            streamed.streams.append(request.number + index)
            streamed.token_ids.append(token)
            return None
        choice.finish_reason = None if news == "token" else news
        logprobs = [{token: Logprob(-1.0, 1)}] if request.rated else None
        return CompletionOutput(index, "", [token], None, logprobs, choice.finish_reason)

    def counters(self) -> SchedulerCounters:
        return SchedulerCounters(num_scheduled_tokens=self.step_number + 1)

    def check_device(self) -> None:
        pass


class Wire:
    """In place of the socket: keeps what is sent, and has nothing to receive but the end."""

    def __init__(self, engine: PlannedEngine) -> None:
        self.engine = engine
        self.sent: list[bytes] = []

    def recv(self, flags: int) -> bytes:
        if self.engine.step_number + 1 < self.engine.num_steps:
            raise zmq.Again
        return msgspec.msgpack.encode(wire.Shutdown())

    def send(self, data: bytes) -> None:
        self.sent.append(data)


def messages_of(requests: list[Planned], num_steps: int) -> list[Any]:
    """What the engine's process says of each step."""
    engine = PlannedEngine(requests, num_steps)
    socket = Wire(engine)
    EngineLoop(engine, socket).run()  # type: ignore[arg-type]
    return [decode(data) for data in socket.sent]


def stream_of(request: Planned) -> RequestStream:
    params = SamplingParams(
        n=len(request.choices), logprobs=0 if request.rated else None, detokenize=False, max_tokens=None
    )
    prompt = ProcessedPrompt(None, [1])
    asked = Request(str(request.number), [1], params)
    kind = RequestOutputKind.CUMULATIVE
    return RequestStream(request.number, asked, prompt, kind, None, LogprobMaker(None))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Planned], int]:
    num_steps = draw(st.integers(1, 6))
    news = st.lists(
        st.sampled_from(["token"] * 4 + ["", "stop", "length"]), min_size=num_steps, max_size=num_steps
    )
    some_step = st.none() | st.none() | st.integers(0, num_steps - 1)
    requests, number = [], draw(st.sampled_from([0, 2**40]))
    for _ in range(draw(st.integers(0, 4))):
        choices = [Choice(draw(news)) for _ in range(draw(st.integers(1, 3)))]
        requests.append(Planned(number, choices, draw(st.booleans()), draw(some_step), draw(some_step)))
        number += len(choices)
    return requests, num_steps


@given(plans())
def test_any_mix_of_outcomes_reaches_its_streams(plan: tuple[list[Planned], int]) -> None:
    requests, num_steps = plan
    told = messages_of(requests, num_steps)
    assert len(told) == num_steps
    receiver = AsyncEngine(EngineConfig(model="none"))
    streams = [stream_of(request) for request in requests]
    for stream in streams:
        receiver._streams.add(stream)
    for step, message in enumerate(told):
        for request, stream in zip(requests, streams, strict=True):
            if request.aborted == step:
                receiver.abort_stream(stream)
        receiver._take(message)
    for request, stream in zip(requests, streams, strict=True):
        check(request, stream, num_steps)
    assert receiver.num_unfinished_requests == sum(not stream.finished for stream in streams)


def check(request: Planned, stream: RequestStream, num_steps: int) -> None:
    """The stream has what the engine gave it by the end of its request, its failure or its abortion."""
    end = num_steps if request.aborted is None else request.aborted
    failed = request.fails is not None and request.fails < end
    if failed and not request.is_over():
        with pytest.raises(RequestFailedError, match="a step that fails"):
            stream.take()
        return
    for choice, found in zip(request.choices, stream.choices, strict=True):
        seen = [token for step, token in choice.drawn if step < end]
        assert found.token_ids == seen
        if len(seen) == len(choice.drawn) and choice.finish_reason:
            assert found.finish_reason == choice.finish_reason
        else:
            assert found.finish_reason == (None if request.aborted is None else "abort")
        assert (found.output().logprobs is not None) == request.rated


def test_what_goes_on_takes_twelve_bytes_a_token() -> None:
    choices = [Choice(["token", "token", "stop"]) for _ in range(256)]
    requests = [Planned(number, [choice], False, None, None) for number, choice in enumerate(choices)]
    _, going_on, _ = messages_of(requests, 3)
    assert going_on.requests == []
    assert list(going_on.tokens.unpack()) == [(i, choice.drawn[1][1]) for i, choice in enumerate(choices)]
    assert len(msgspec.msgpack.encode(going_on)) < 12 * 256 + 200  # statistics


def test_columns_of_different_lengths_are_an_error() -> None:
    columns = wire.TokenColumns.pack([1, 2], [3])
    with pytest.raises(ValueError, match="shorter"):
        list(columns.unpack())
