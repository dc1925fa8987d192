"""What goes wrong while requests run: clients that leave, engines that fail or die, signals."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import CHAT_TEMPLATE
from tests.server.rig import Answer, Client, Server, ServerThread, wait_gone, wait_until

SLOW = {"prompt": "abc", "max_tokens": 5000, "cache_salt": "slow:0.005"}


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerThread]:
    with ServerThread(
        model, scripted=True, max_num_seqs=4, max_model_len=8192, chat_template=CHAT_TEMPLATE
    ) as server:
        yield server


def leave_after(client: Client, path: str, body: dict[str, Any], seconds: float) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(seconds)


def in_flight(server: ServerThread) -> tuple[int, int, int]:
    stats = server.server.service.metrics.stats
    assert stats is not None
    return stats.num_running, stats.num_waiting, server.server.service.engine.num_unfinished_requests


@pytest.mark.parametrize(
    "fields",
    [{"stream": True}, {}, {"n": 2}, {"n": 2, "stream": True}, {"prompt": ["abc", "de"], "stream": True}],
    ids=str,
)
def test_a_client_that_leaves_ends_its_request(server: ServerThread, fields: dict[str, Any]) -> None:
    """vllm#9428, vllm#54947."""
    leave_after(server, "/v1/completions", SLOW | fields, 0.3)
    left = time.monotonic()
    wait_until(lambda: in_flight(server) == (0, 0, 0), 2)
    assert time.monotonic() - left < 2
    chat = {key: value for key, value in (SLOW | fields).items() if key != "prompt"}
    leave_after(server, "/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "a"}]}, 0.2)
    wait_until(lambda: in_flight(server) == (0, 0, 0), 2)


def test_a_client_that_leaves_gives_its_blocks_back(model: str) -> None:
    """vllm#9428: of a real engine, from the middle of a text and from the queue."""
    body = {"prompt": [5] * 100, "max_tokens": 400, "ignore_eos": True, "n": 2}
    with ServerThread(model, max_num_seqs=2) as server, ThreadPoolExecutor(4) as pool:
        wait_until(lambda: server.metric("pagedinfer_kv_cache_usage_perc") == 0)
        for stream in (True, False, True, False):
            pool.submit(leave_after, server, "/v1/completions", body | {"stream": stream}, 0.3)
        wait_until(lambda: server.metric("pagedinfer_kv_cache_usage_perc") > 0)
        wait_until(lambda: in_flight(server)[2] == 0)
        wait_until(lambda: in_flight(server) == (0, 0, 0), 2)
        wait_until(lambda: server.metric("pagedinfer_kv_cache_usage_perc") == 0, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue(server: ServerThread, stream: bool) -> None:
    """vllm#9428."""
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            pool.submit(leave_after, server, "/v1/completions", SLOW, 1.2)
        wait_until(lambda: in_flight(server)[0] == 4)
        for _ in range(4):
            pool.submit(leave_after, server, "/v1/completions", SLOW | {"stream": stream}, 0.4)
        wait_until(lambda: in_flight(server) == (4, 4, 8))
        wait_until(lambda: in_flight(server) == (4, 0, 4), 2)
    wait_until(lambda: in_flight(server) == (0, 0, 0), 2)


def test_leaving_at_any_moment(server: ServerThread) -> None:
    with ThreadPoolExecutor(16) as pool:
        for i in range(64):
            fields = [{"stream": True}, {}, {"n": 3}, {"max_tokens": 3, "stream": True}][i % 4]
            pool.submit(leave_after, server, "/v1/completions", SLOW | fields, 0.001 * i)
    wait_until(lambda: in_flight(server) == (0, 0, 0), 2)
    assert server.complete("abc", max_tokens=3).json["choices"][0]["text"] == "abc"


def test_an_error_in_a_step(server: ServerThread) -> None:
    """vllm-mlx#101: the stream gets the error as an event and its end; others a 500; the engine lives on."""
    body = {"prompt": "abc", "max_tokens": 50, "cache_salt": "fail:3"}
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.post, "/v1/completions", SLOW)
        wait_until(lambda: in_flight(server)[0] == 1)
        *chunks, last = server.stream("/v1/completions", body)
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert set(last) == {"error"}
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "in the middle of a step" in last["error"]["message"]
        answer = whole.result(20)
    assert answer.status == 500
    assert answer.error["code"] == "engine_error"
    assert server.complete("abc", max_tokens=50, cache_salt="fail:1").status == 500
    events = server.post("/v1/completions", body | {"cache_salt": "fail:1", "stream": True})
    assert events.status == 500  # no token was there yet, and so no headers
    chat = {"messages": [{"role": "user", "content": "a"}], "cache_salt": "fail:4", "max_tokens": 9}
    assert "error" in server.stream("/v1/chat/completions", chat)[-1]
    assert server.get("/health").status == 200
    assert server.text("abc", max_tokens=3) == "abc"


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
def test_an_error_in_a_step_of_a_model_leaves_others_alone(model: str, overlap: bool) -> None:
    """Two slots: the request beside it is lost too, those behind it get what they would have got."""
    fields = {"max_tokens": 40, "ignore_eos": True}
    with ServerThread(model, failing=True, max_num_seqs=2, async_scheduling=overlap) as server:
        alone = [server.text("the fox", seed=seed, **fields) for seed in range(4)]
        long = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
        with ThreadPoolExecutor(6) as pool:
            failing = pool.submit(server.stream, "/v1/completions", long | {"seed": 666})
            beside = pool.submit(server.complete, **long)
            wait_until(lambda: in_flight(server)[0] == 2)
            others = [pool.submit(server.text, "the fox", seed=seed, **fields) for seed in range(4)]
            *chunks, last = failing.result(20)
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
            assert "a step that fails" in last["error"]["message"]
            assert beside.result(20).status == 500
            assert beside.result().error["code"] == "engine_error"
            assert [other.result(20) for other in others] == alone
        assert server.get("/health").status == 200
        assert server.metric("pagedinfer_request_success_total", finished_reason="error") == 2
        wait_until(lambda: server.metric("pagedinfer_kv_cache_usage_perc") == 0)


# ---- processes -------------------------------------------------------------------------------------


def read_all(server: Server, body: dict[str, Any], found: list[Any]) -> None:
    """Appends the answer, or the stream's lines, or the error of the connection."""
    started = time.monotonic()
    try:
        if body.get("stream"):
            with server.open_stream("/v1/completions", body) as response:
                found.append((response.read().decode(), time.monotonic() - started))
        else:
            found.append((server.post("/v1/completions", body), time.monotonic() - started))
    except (OSError, http.client.HTTPException) as error:
        found.append((error, time.monotonic() - started))


@contextmanager
def reading(server: Server, *bodies: dict[str, Any], timeout: float = 10) -> Iterator[list[Any]]:
    """What comes of these requests, which have begun when the block does, and have ended after it."""
    found: list[Any] = []
    threads = [threading.Thread(target=read_all, args=(server, SLOW | body, found)) for body in bodies]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    yield found
    for thread in threads:
        thread.join(timeout)


def test_a_dead_engine(model: str) -> None:
    """vllm#39863, vllm PR#24897: requests in flight get errors, /health says so, and the exit code is 1."""
    with Server(model, "--shutdown-timeout", "5", scripted=True) as server:
        bodies = [{"max_tokens": 400}, {"max_tokens": 400, "stream": True}]
        with reading(server, *bodies) as found:
            died = time.monotonic()
            os.kill(server.engine_pid(), signal.SIGKILL)
            statuses = set()
            while server.process.poll() is None:
                try:
                    statuses.add(server.get("/health").status)
                except OSError:
                    break
                time.sleep(0.02)
        assert time.monotonic() - died < 5
        assert statuses <= {200, 503}
        assert server.wait(15) == 1
        assert "has ended" in server.log
    for answer, _ in found:
        if isinstance(answer, Answer):
            assert answer.status == 500
            assert answer.error["code"] == "engine_dead"
        else:
            assert isinstance(answer, str), answer
            assert '"error"' in answer
            assert answer.endswith("data: [DONE]\n\n")


def test_sigterm_lets_running_requests_finish_and_takes_no_others(model: str) -> None:
    """vllm RFC#24885, vllm#55510."""
    with Server(model, "--shutdown-timeout", "20", scripted=True) as server:
        bodies = [{"max_tokens": 200}, {"max_tokens": 200, "stream": True}]
        with reading(server, *bodies, timeout=15) as found:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.4)
            with pytest.raises(OSError):  # noqa: PT011
                server.get("/health")
        assert server.wait(15) == 0
    for answer, _ in found:
        if isinstance(answer, Answer):
            assert answer.json["usage"]["completion_tokens"] == 200
        else:
            assert '"finish_reason":"length"' in answer
            assert answer.endswith("data: [DONE]\n\n")


def test_sigterm_ends_what_does_not_finish_in_time(model: str) -> None:
    flags = ["--shutdown-timeout", "1", "--max-model-len", "8192"]
    with Server(model, *flags, scripted=True) as server, reading(server, {"stream": True}) as found:
        started = time.monotonic()
        assert server.stop(signal.SIGTERM, 30) == 0
        assert time.monotonic() - started < 20  # it is 4 on a machine with nothing else to do
    [(answer, _)] = found
    assert "the server is being shut down" in answer
    assert answer.endswith("data: [DONE]\n\n")


def test_a_second_signal_ends_it_at_once(model: str) -> None:
    flags = ["--max-model-len", "8192"]
    with Server(model, *flags, scripted=True) as server, reading(server, {"stream": True}):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        started = time.monotonic()
        assert server.stop(signal.SIGINT, 5) == 130
        assert time.monotonic() - started < 2


def test_an_engine_that_cannot_start(model: str) -> None:
    """vllm#17618: the server ends with the engine's own words; until then it says that it is loading."""
    with Server(model, "--seed", "13", scripted=True, wait=False) as server:
        server.wait_listening()
        assert server.wait(30) == 1
        assert "seed=13 brings bad luck" in server.log


def test_while_loading(model: str) -> None:
    with Server(model, scripted=True, wait=False) as server:
        server.wait_listening()
        answer = server.get("/health")
        if answer.status == 503:  # it may have been quicker than us
            assert answer.headers["retry-after"]
            assert "being loaded" in answer.error["message"]
            assert server.complete("a").status == 503
            assert server.get("/metrics").status == 200
        assert server.stop(signal.SIGINT, 20) == 130


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["/no/such/folder", "--port", "0"], 1, "no folder '/no/such/folder'"),
        ([], 2, "which MODEL?"),
        (["m", "--block-size", "7"], 2, "block_size must be one of"),
        (["m", "--prot", "8000"], 2, "did you mean --port?"),
        (["m", "--port", "x"], 2, "'x' is not a port"),
    ],
    ids=str,
)
def test_wrong_starts(
    flags: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from pagedinfer.cli.main import main

    assert main(["serve", *flags]) == code
    captured = capsys.readouterr()
    assert message in captured.err + caplog.text
    assert captured.out == ""


def test_a_port_that_is_taken(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pagedinfer.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", model, "--port", str(port)]) == 1
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err


def test_kill_9_of_the_server_leaves_nothing_behind(model: str) -> None:
    """vllm#55510. tests.server.trials.kill does this at fifty random moments."""
    with Server(model, scripted=True) as server:
        engine = server.engine_pid()
        folders = set(Path(tempfile.gettempdir()).glob("pagedinfer-*"))
        assert folders
        with reading(server, {"stream": True}):
            server.process.kill()
            server.process.wait()
            wait_gone({engine}, 5)
        wait_until(
            lambda: len(set(Path(tempfile.gettempdir()).glob("pagedinfer-*")) & folders) < len(folders)
        )
