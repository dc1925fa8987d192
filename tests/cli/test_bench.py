"""bench serve: its definitions, its workload, and a run against a server."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedinfer.cli.load.report import parse_limits, percentile, report, table, time_per_output_token
from pagedinfer.cli.load.run import Result, run_load
from pagedinfer.cli.load.workload import Workload
from pagedinfer.cli.main import main


def test_the_definitions() -> None:
    """TTFT from sending; TPOT without the first token; ITL of all gaps; goodput of what keeps all limits."""
    first = Result(ttft=0.1, latency=1.0, itl=[0.3, 0.3, 0.3], num_prompt_tokens=5, num_output_tokens=4)
    second = Result(ttft=0.3, latency=0.3, num_prompt_tokens=7, num_output_tokens=1)
    failed = Result(error="x")
    assert time_per_output_token(first) == pytest.approx(0.3)
    assert time_per_output_token(second) is None
    figures = report([first, second, failed], 2.0, {"ttft": 200.0, "tpot": 300.5})
    assert figures["completed"] == 2
    assert figures["failed"] == 1
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 2.5
    assert figures["total_token_throughput"] == 8.5
    assert figures["request_goodput"] == 0.5  # the first
    assert figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx(300)
    assert figures["p99_itl_ms"] == pytest.approx(300)
    assert figures["median_e2el_ms"] == pytest.approx(650)
    text = table(figures)
    for title in ("Goodput", "TTFT", "TPOT", "ITL", "E2EL", "p99"):
        assert title in text
    assert "request_goodput" not in report([first], 1.0, {})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:-1", "ttft:x", "speed:5", "ttft:nan"])
def test_wrong_limits(word: str) -> None:
    with pytest.raises(ValueError, match="--goodput takes limits"):
        parse_limits([word])


def test_a_workload_is_reproducible_and_within_its_bounds() -> None:
    options: dict[str, Any] = {
        "model": "m",
        "vocab_size": 500,
        "num_requests": 50,
        "input_len": 20,
        "output_len": 10,
    }
    workload = Workload(**options, prefix_len=3, range_ratio=0.5)
    bodies = list(workload.bodies())
    assert bodies == list(workload.bodies())
    assert bodies != list(Workload(**options, prefix_len=3, range_ratio=0.5, seed=1).bodies())
    lengths = {len(body["prompt"]) - 3 for body in bodies}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 5
    assert {tuple(body["prompt"][:3]) for body in bodies} == {tuple(bodies[0]["prompt"][:3])}
    assert all(5 <= body["max_tokens"] <= 15 for body in bodies)
    assert all(token < 500 for body in bodies for token in body["prompt"])
    assert "messages" in next(Workload(**options, chat=True).bodies())
    with pytest.raises(ValueError, match="random-range-ratio"):
        Workload(**options, range_ratio=1.0)


async def _serve(pause: float, num_tokens: int) -> asyncio.Server:
    """A server whose tokens come at known times."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

        def send(event: str) -> None:
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

        await asyncio.sleep(2 * pause)
        for i in range(num_tokens):
            send(json.dumps({"choices": [{"text": "a"}]}))
            if i < num_tokens - 1:
                await asyncio.sleep(pause)
        send(json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}}))
        send("[DONE]")
        writer.write(b"0\r\n\r\n")
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def test_times_are_those_of_the_server() -> None:
    async def run() -> tuple[list[Result], float]:
        async with await _serve(0.05, 6) as server:
            port = server.sockets[0].getsockname()[1]
            workload = Workload(model="m", vocab_size=500, num_requests=8, input_len=3, output_len=6)
            url = f"http://127.0.0.1:{port}"
            return await run_load(
                workload, base_url=url, endpoint="/v1/completions", max_concurrency=4, num_warmups=0
            )

    results, seconds = asyncio.run(run())
    figures = report(results, seconds, {})
    assert figures["failed"] == 0, results[0].error
    assert figures["median_ttft_ms"] == pytest.approx(100, rel=0.25)
    assert figures["median_itl_ms"] == pytest.approx(50, rel=0.25)
    assert figures["median_tpot_ms"] == pytest.approx(50, rel=0.25)
    assert figures["median_e2el_ms"] == pytest.approx(350, rel=0.25)
    assert len(results[0].itl) == 5
    assert 2 * 0.35 <= seconds < 2.0  # four at once


@pytest.mark.parametrize(
    ("flag", "value"),
    [("request_rate", 0.0), ("burstiness", 0.0), ("max_concurrency", 0), ("num_warmups", -1)],
)
def test_a_wrong_load_is_refused(flag: str, value: float) -> None:
    workload = Workload(model="m", vocab_size=500, num_requests=1, input_len=3, output_len=1)
    options: dict[str, Any] = {"base_url": "http://127.0.0.1:1", "endpoint": "/v1/completions", flag: value}
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} must be .*, got {value}"):
        asyncio.run(run_load(workload, **options))


@pytest.mark.parametrize("text", ["{", "5", "[]"])
def test_a_body_that_is_no_object_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--extra-body", text]) == 2
    assert f"--extra-body: must be a JSON object, got '{text}'" in capsys.readouterr().err


def test_requests_come_at_their_rate() -> None:
    async def run() -> float:
        async with await _serve(0.0, 1) as server:
            port = server.sockets[0].getsockname()[1]
            workload = Workload(model="m", vocab_size=500, num_requests=30, input_len=3, output_len=1)
            url = f"http://127.0.0.1:{port}"
            started = time.perf_counter()
            await run_load(
                workload, base_url=url, endpoint="/v1/completions", request_rate=60.0, burstiness=100.0
            )
            return time.perf_counter() - started

    assert asyncio.run(run()) == pytest.approx(0.5, rel=0.4)


def test_a_run_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_llama: Any) -> None:
    pytest.importorskip("fastapi")
    from tests.server.rig import ServerThread

    file = tmp_path / "result.json"
    with ServerThread(tiny_llama.path, scripted=True) as server:
        url = f"http://127.0.0.1:{server.port}"
        flags = [
            "--num-prompts",
            "20",
            "--random-input-len",
            "10",
            "--random-output-len",
            "15",
            "--max-concurrency",
            "5",
        ]
        assert (
            main(
                [
                    "bench",
                    "serve",
                    "--base-url",
                    url,
                    *flags,
                    "--goodput",
                    "ttft:10000",
                    "--save-result",
                    str(file),
                ]
            )
            == 0
        )
        assert "Output tokens a second" in capsys.readouterr().out
        figures = json.loads(file.read_text())
        assert figures["completed"] == 20
        assert figures["total_output_tokens"] == 300
        assert figures["total_input_tokens"] == 200
        assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
        assert main(["bench", "serve", "--base-url", url, *flags, "--model", "other"]) == 1
        assert "there is no model 'other'" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", url]) == 1
    assert "cannot be talked to" in capsys.readouterr().err
