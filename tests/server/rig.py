"""Servers in processes of their own, and a small client that sends exactly what it is told."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
TINY_OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 256, "max_num_seqs": 16}
TINY_FLAGS = ["--device", "cpu", "--num-gpu-blocks-override", "256", "--max-num-seqs", "16"]


class Answer(NamedTuple):
    """Of a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that is one, its form checked."""
        body = self.json
        assert list(body) == ["error"], body
        assert list(body["error"]) == ["message", "type", "param", "code"], body
        assert isinstance(body["error"]["message"], str)
        return body["error"]


class Client:
    """Sends requests to a port."""

    port = 0

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = json.dumps(body)
        return self.request("POST", path, data, {"content-type": "application/json"} | headers)

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt} | fields)

    def text(self, prompt: Any, **fields: Any) -> str:
        answer = self.complete(prompt, **fields)
        assert answer.status == 200, answer.body
        return str(answer.json["choices"][0]["text"])

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, which must end with [DONE]; an error among them is one like others."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.body.decode().split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    @contextmanager
    def open_stream(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """A stream to read line by line; leaving the block closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps(body | {"stream": True})
        connection.request("POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        try:
            yield response
        finally:
            response.close()
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        total = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if found is None or found[1] != name:
                continue
            given = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= given.items():
                total += float(found[3])
        return total


class ServerThread(Client):
    """A server in a thread of this process, with its engine in another; quicker to start than a process."""

    def __init__(
        self,
        model: str,
        *,
        scripted: bool = False,
        failing: bool = False,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from pagedinfer import EngineConfig
        from pagedinfer.server import run
        from pagedinfer.server.settings import ServerSettings
        from tests.server.conftest import FAILING_ENGINE, SCRIPTED_ENGINE

        config = EngineConfig(model=model, **(options if scripted else TINY_OPTIONS | options))
        more: Any = {"engine_command": SCRIPTED_ENGINE} if scripted else {}
        if failing:
            more["engine_command"] = FAILING_ENGINE
        self.server = run.make_server(config, ServerSettings(**settings or {}), **more)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(self._is_ready, 120)
        return self

    def abort_all(self) -> None:
        """Ends all requests."""
        engine = self.server.service.engine
        loop = engine._reader.get_loop()  # type: ignore[union-attr]

        def abort() -> None:
            for stream in engine._streams:
                engine.abort_stream(stream)

        loop.call_soon_threadsafe(abort)

    def _is_ready(self) -> bool:
        assert self._thread.is_alive(), self.server.service.failure
        with suppress(OSError):
            return self.get("/health").status == 200
        return False

    def __exit__(self, *exception: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)


class Server(Client):
    """`pagedinfer serve` as a process; ends with the `with` block, and leaves no process behind."""

    def __init__(self, model: str, *flags: str, scripted: bool = False, wait: bool = True) -> None:
        module = "tests.server.scripted_server" if scripted else "pagedinfer"
        words = [model, *flags] if scripted else ["serve", model, *TINY_FLAGS, *flags]
        if "--uds" not in flags:
            words += ["--port", "0"]
        self.log = ""
        self._listening = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.descendants: set[int] = set()
        if wait:
            self.wait_ready()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            found = re.search(r"listening at (?:http://[^ ]*:(\d+)|(\S+));", line)
            if found:
                self.port = int(found[1] or 0)
                self._listening.set()
        self._listening.set()

    def wait_listening(self, timeout: float = 60) -> None:
        assert self._listening.wait(timeout)

    def wait_ready(self, timeout: float = 120) -> None:
        self.wait_listening(timeout)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            with suppress(ConnectionError):
                if self.port and self.get("/health").status == 200:
                    self.descendants = set(children_of(self.process.pid))
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout} s:\n{self.log}")

    def engine_pid(self) -> int:
        [pid] = [pid for pid in children_of(self.process.pid) if "engine" in command_of(pid)]
        return pid

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = 30) -> int:
        """The exit code. Nothing that it started may be left."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        wait_gone(self.descendants)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        if error is not None:
            print(self.log)


def children_of(pid: int) -> list[int]:
    """All processes that descend from one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = []
    pending = [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: set[int], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, [command_of(pid) for pid in pids if is_running(pid)]
        time.sleep(0.02)


def wait_until(condition: Any, timeout: float = 5) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)
