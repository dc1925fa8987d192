"""AsyncEngine: streams of an engine in another process, and what happens when one of the two ends."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pagedinfer import LLM, EngineConfig, RequestOutput, RequestTooLargeError, SamplingParams
from pagedinfer.errors import EngineDeadError, EngineStartError, QueueFullError, RequestFailedError
from pagedinfer.sampling_params import RequestOutputKind
from pagedinfer.server import engine_handle, messages
from pagedinfer.server.async_engine import AsyncEngine
from tests.server.conftest import SCRIPTED_ENGINE

DELTA = RequestOutputKind.DELTA
OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 8}


@asynccontextmanager
async def scripted(model: str, max_queued: int | None = None, **options: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=model, **options)
    async with AsyncEngine(config, command=SCRIPTED_ENGINE, max_num_queued_requests=max_queued) as engine:
        yield engine


async def collect(
    engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


def salted(text: str, salt: str) -> dict[str, str]:
    return {"prompt": text, "cache_salt": salt}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_gives_what_llm_gives(model: str) -> None:
    """Greedy, seeded, penalised, with stop strings, log-probabilities and several choices."""
    requests = [
        ("Hello", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)),
        ("中 fox", SamplingParams(temperature=1.0, seed=7, max_tokens=12, logprobs=2, n=2)),
        ("The dog", SamplingParams(seed=3, repetition_penalty=1.3, max_tokens=16, stop=["e", "a"], n=3)),
        ("A cat", SamplingParams(seed=5, max_tokens=9, detokenize=False, n=2)),
        ([5, 6, 7], SamplingParams(seed=1, max_tokens=6, prompt_logprobs=1, bad_words=["fox"], min_tokens=3)),
    ]
    with LLM(model, **OPTIONS) as llm:
        expected = llm.generate([p for p, _ in requests], [p for _, p in requests], use_tqdm=False)

    async def run() -> list[list[RequestOutput]]:
        async with AsyncEngine(EngineConfig(model=model, **OPTIONS)) as engine:
            return await asyncio.gather(*(collect(engine, prompt, params) for prompt, params in requests))

    for outputs, right in zip(asyncio.run(run()), expected, strict=True):
        last = outputs[-1]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        for choice, choice_right in zip(last.outputs, right.outputs, strict=True):
            assert choice.text == choice_right.text
            assert choice.token_ids == choice_right.token_ids
            assert choice.finish_reason == choice_right.finish_reason
            assert choice.stop_reason == choice_right.stop_reason
            assert choice.cumulative_logprob == pytest.approx(choice_right.cumulative_logprob, abs=1e-3)
            assert (choice.logprobs is None) == (choice_right.logprobs is None)
            for entry, entry_right in zip(choice.logprobs or [], choice_right.logprobs or [], strict=True):
                assert [*entry] == [*entry_right]
                assert [e.rank for e in entry.values()] == [e.rank for e in entry_right.values()]
                assert [e.decoded_token for e in entry.values()] == [
                    e.decoded_token for e in entry_right.values()
                ]
        assert (last.prompt_logprobs is None) == (right.prompt_logprobs is None)
        if last.prompt_logprobs is not None and right.prompt_logprobs is not None:
            assert last.prompt_logprobs[0] is None
            assert [[*e] for e in last.prompt_logprobs[1:] if e] == [
                [*e] for e in right.prompt_logprobs[1:] if e
            ]
        assert last.metrics.num_generation_tokens == sum(len(c.token_ids) for c in last.outputs)
        times = last.metrics
        assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts


def test_deltas_add_up(model: str) -> None:
    params = SamplingParams(max_tokens=40, output_kind=DELTA, n=2, stop=["zzz"])

    async def run() -> list[RequestOutput]:
        async with scripted(model) as engine:
            return await collect(engine, "Grüße, 世界 🔥!", params)

    outputs = asyncio.run(run())
    script = outputs[0].prompt_token_ids
    for index in range(2):
        parts = [c for output in outputs for c in output.outputs if c.index == index]
        token_ids = [token for part in parts for token in part.token_ids]
        assert token_ids == (script * 40)[:40]
        text = "".join(part.text for part in parts)
        assert text.startswith("Grüße, 世界 🔥!Grüße")
        assert [part.finish_reason for part in parts][-1] == "length"


def test_a_slow_reader_gets_more_at_a_time(model: str) -> None:
    async def run() -> list[RequestOutput]:
        outputs = []
        async with scripted(model) as engine:
            params = SamplingParams(max_tokens=30, output_kind=DELTA)
            async for output in engine.generate("abc", params):
                outputs.append(output)
                await asyncio.sleep(0.2)
        return outputs

    outputs = asyncio.run(run())
    assert 1 < len(outputs) < 20
    assert "".join(o.outputs[0].text for o in outputs) == "abc" * 10


def test_a_stop_string_ends_the_choice_in_the_engine_too(model: str) -> None:
    async def run() -> tuple[RequestOutput, int]:
        async with scripted(model) as engine:
            params = SamplingParams(max_tokens=None, stop="fox")
            outputs = await collect(engine, salted("the fox sleeps", "slow:0.001"), params)
            for _ in range(200):
                stats = engine_stats.get("running")
                if stats == 0:
                    break
                await asyncio.sleep(0.01)
            return outputs[-1], engine_stats["running"]

    engine_stats: dict[str, int] = {}
    original = AsyncEngine._take_outputs

    def take(self: AsyncEngine, message: messages.Outputs) -> None:
        if message.stats is not None:
            engine_stats["running"] = message.stats.num_running
        original(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncEngine, "_take_outputs", take)
        output, running = asyncio.run(run())
    assert output.outputs[0].text == "the "
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "fox")
    assert running == 0


def test_leaving_and_aborting_end_a_request(model: str) -> None:
    async def run() -> None:
        async with scripted(model) as engine:
            params = SamplingParams(max_tokens=None, output_kind=DELTA)
            async for _ in engine.generate(salted("abc", "slow:0.01"), params):
                break
            await asyncio.sleep(0.05)  # lets the generator be closed
            assert engine.num_unfinished_requests == 0
            task = asyncio.create_task(collect(engine, salted("abc", "slow:0.01"), params, request_id="x"))
            await asyncio.sleep(0.1)
            assert engine.abort("x")
            assert not engine.abort("x")
            outputs = await asyncio.wait_for(task, 5)
            assert outputs[-1].outputs[0].finish_reason == "abort"
            task = asyncio.create_task(collect(engine, salted("abc", "slow:0.01"), params))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.num_unfinished_requests == 0

    asyncio.run(run())


def test_an_id_may_be_used_again(model: str) -> None:
    """And whoever leaves the first request late ends that one, not the second."""

    async def run() -> tuple[int, list[RequestOutput]]:
        async with scripted(model) as engine:
            first = engine.submit("abc", SamplingParams(max_tokens=2), "same")
            while not (await first.next()).finished:
                pass
            second = asyncio.create_task(
                collect(engine, salted("abc", "slow:0.01"), SamplingParams(max_tokens=9), request_id="same")
            )
            await asyncio.sleep(0.05)
            engine.abort_stream(first)
            return engine.num_unfinished_requests, await second

    num_unfinished, outputs = asyncio.run(run())
    assert num_unfinished == 1
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_what_is_refused_is_refused_before_it_is_sent(model: str) -> None:
    async def run() -> None:
        async with scripted(model) as engine:
            with pytest.raises(RequestTooLargeError, match="its prompt has 600 tokens"):
                engine.submit([5] * 600)
            with pytest.raises(ValueError, match="stop_token_ids must hold token ids in"):
                engine.submit("a", SamplingParams(stop_token_ids=[10**6]))
            with pytest.raises(ValueError, match="the prompt is empty"):
                engine.submit("")
            with pytest.raises(ValueError, match="logits_processors are functions"):
                engine.submit("a", SamplingParams(logits_processors=[print]))
            engine.submit("a", SamplingParams(), "same")
            with pytest.raises(ValueError, match="unfinished request 'same' already"):
                engine.submit("a", SamplingParams(), "same")

    asyncio.run(run())


def test_the_queue_is_bounded(model: str) -> None:
    async def run() -> None:
        async with scripted(model, max_queued=2, max_num_seqs=3) as engine:
            prompt, params = salted("abc", "slow:0.01"), SamplingParams(max_tokens=300)
            streams = [engine.submit(prompt, params) for _ in range(5)]
            with pytest.raises(QueueFullError, match="2 requests are waiting, and max_num_queued_requests"):
                engine.submit(prompt, params)
            await asyncio.sleep(0.3)  # the engine has reported by now
            with pytest.raises(QueueFullError):
                engine.submit(prompt, params)
            for stream in streams:
                engine.abort_stream(stream)
            await asyncio.sleep(0.3)
            assert (await collect(engine, "abc", SamplingParams(max_tokens=3)))[-1].finished

    asyncio.run(run())


def test_an_error_in_a_step_fails_its_requests_and_the_engine_lives_on(model: str) -> None:
    async def run() -> None:
        async with scripted(model) as engine:
            other = asyncio.create_task(collect(engine, salted("abc", "slow:0.01"), SamplingParams()))
            await asyncio.sleep(0.05)
            with pytest.raises(RequestFailedError, match="in the middle of a step"):
                await collect(engine, salted("abc", "fail:3"), SamplingParams())
            with pytest.raises(RequestFailedError):
                await other
            assert (await collect(engine, "abc", SamplingParams(max_tokens=3)))[-1].outputs[0].text == "abc"

    asyncio.run(run())


def test_an_error_in_a_step_leaves_those_that_wait_alone(model: str) -> None:
    async def run() -> None:
        async with scripted(model, max_num_seqs=2) as engine:
            prompts = [salted("abc", "slow:0.01"), salted("abc", "fail:3"), "abcd", "efg"]
            results = await asyncio.gather(
                *(collect(engine, prompt, SamplingParams(max_tokens=8)) for prompt in prompts),
                return_exceptions=True,
            )
            assert [isinstance(result, RequestFailedError) for result in results] == [
                True,
                True,
                False,
                False,
            ]
            texts = [result[-1].outputs[0].text for result in results[2:]]  # type: ignore[index]
            assert texts == ["abcdabcd", "efgefgef"]

    asyncio.run(run())


@pytest.mark.parametrize("salt", ["break", "die:2"])
def test_a_dead_engine_fails_everything_at_once(model: str, salt: str) -> None:
    """vllm#39863."""

    async def run() -> float:
        async with scripted(model) as engine:
            others = [
                asyncio.create_task(
                    collect(engine, salted("abc", "slow:0.01"), SamplingParams(max_tokens=99))
                )
                for _ in range(3)
            ]
            await asyncio.sleep(0.05)
            started = time.monotonic()
            results = await asyncio.gather(
                *others, collect(engine, salted("abc", salt), SamplingParams()), return_exceptions=True
            )
            assert all(isinstance(r, EngineDeadError | RequestFailedError) for r in results), results
            await engine.wait_dead()
            assert engine.is_dead
            with pytest.raises(EngineDeadError, match="has ended unexpectedly"):
                engine.submit("abc")
            return time.monotonic() - started

    assert asyncio.run(run()) < 5


def test_an_engine_that_cannot_start_says_why(model: str) -> None:
    async def run(seed: int, folder: str, command: tuple[str, ...]) -> None:
        async with AsyncEngine(EngineConfig(model=folder, seed=seed), command=command):
            pass

    with pytest.raises(EngineStartError, match="brings bad luck"):
        asyncio.run(run(13, model, SCRIPTED_ENGINE))
    with pytest.raises(EngineStartError, match="has ended unexpectedly"):
        asyncio.run(run(0, model, (sys.executable, "-c", "raise SystemExit(3)")))


def test_an_idle_engine_does_nothing(model: str) -> None:
    def cpu_ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    async def run() -> int:
        async with scripted(model) as engine:
            await collect(engine, "abc", SamplingParams())
            await asyncio.sleep(0.2)
            assert engine.pid is not None
            before = cpu_ticks(engine.pid)
            await asyncio.sleep(1.0)
            return cpu_ticks(engine.pid) - before

    assert asyncio.run(run()) <= 1  # of 100 a second


def test_the_engine_ends_with_its_parent(model: str) -> None:
    """vllm#55510: also when it is killed in the middle of a step, and the socket's folder goes, too."""
    code = f"""
import asyncio, os, sys
from pagedinfer import EngineConfig, SamplingParams
from pagedinfer.server.async_engine import AsyncEngine
async def main():
    async with AsyncEngine(EngineConfig(model={model!r}), command={SCRIPTED_ENGINE!r}) as engine:
        engine.submit({{"prompt": "abc", "cache_salt": "slow:30"}}, SamplingParams())
        await asyncio.sleep(0.2)
        print(engine.pid, engine._handle._folder, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    assert is_running(int(pid))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (is_running(int(pid)) or Path(folder).exists()):
        time.sleep(0.02)
    assert not is_running(int(pid))
    assert not Path(folder).exists()


def listening(pid: int) -> set[str]:
    """The TCP sockets at which a process listens, by inode."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    open_for_all = {row[9] for row in rows if row[3] == "0A"}
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            found.add(os.readlink(descriptor).partition("[")[2].rstrip("]"))
    return found & open_for_all


def test_the_socket_is_private_and_what_is_no_message_is_ignored(model: str) -> None:
    """CVE-2025-30165: no pickle, no port, and nobody else can reach the socket."""
    before = listening(os.getpid())  # other tests have servers in this process

    async def run() -> None:
        async with scripted(model) as engine:
            folder = Path(engine._handle._folder)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert engine.pid is not None
            assert listening(os.getpid()) == before
            assert listening(engine.pid) == set()
            with zmq.Context() as context, context.socket(zmq.PAIR) as intruder:
                intruder.setsockopt(zmq.LINGER, 0)
                intruder.connect(f"ipc://{folder}/engine")
                intruder.setsockopt(zmq.SNDTIMEO, 100)
                with suppress(zmq.Again):
                    intruder.send(b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.")
            assert engine._handle._socket is not None
            await engine._handle._socket.send(b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.")
            assert (await collect(engine, "abc", SamplingParams(max_tokens=3)))[-1].finished

    asyncio.run(run())


def test_no_source_unpickles_what_comes_from_outside() -> None:
    package = Path(engine_handle.__file__).parents[1]
    paths = [path for part in ("server", "engine", "runner") for path in (package / part).rglob("*.py")]
    assert len(paths) > 20
    for path in paths:
        text = path.read_text()
        for word in ("pickle.load", "Unpickler", "recv_pyobj", "send_pyobj", "marshal.loads", "shelve"):
            assert word not in text, (path, word)


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0.01, 1),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        stop=st.none() | st.lists(st.text("abc", min_size=1), min_size=1),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100)),
        stop_token_ids=st.none() | st.lists(st.integers(0, 99)),
        max_tokens=st.none() | st.integers(1, 99),
    )
)
def test_parameters_survive_the_way_to_the_engine(params: SamplingParams) -> None:
    packed = msgspec.msgpack.encode(messages.params_to_wire(params))
    again = messages.params_from_wire(msgspec.msgpack.decode(packed))
    assert messages.params_to_wire(again) == messages.params_to_wire(params)
