"""Keys, sizes, names: what stands between the network and the routes."""

from __future__ import annotations

import json
import resource
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pagedinfer.errors import PagedinferError
from pagedinfer.server.middleware import ApiKeys
from pagedinfer.server.run import _listen_uds
from tests.server.conftest import CHAT_TEMPLATE
from tests.server.rig import Client, Server, ServerThread, wait_gone

KEY = "a-secret-key"


@pytest.fixture(scope="module")
def guarded(model: str) -> Iterator[Client]:
    settings = {
        "api_keys": (KEY, "schlüssel"),
        "allowed_origins": ("https://a.example",),
        "max_body_bytes": 2**20,
    }
    with ServerThread(model, settings=settings, scripted=True, chat_template=CHAT_TEMPLATE) as server:
        yield server


def raw(client: Client, data: bytes, timeout: float = 10) -> bytes:
    """What the server answers to these bytes, until it closes or says nothing for a while."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=timeout) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.settimeout(1)
            while chunk := connection.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionError):
            pass
        return answer


def test_every_route_but_health_needs_the_key(guarded: Client) -> None:
    """CVE-2025-59425, vllm#58144."""
    paths = guarded.get("/openapi.json", authorization=f"Bearer {KEY}").json["paths"]
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    routes += [("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("OPTIONS", "/v1/models")]
    assert len(routes) > 10
    for method, path in routes:
        path = path.replace("{model}", "x")
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Bearer {KEY}x"},
            {"authorization": f"Basic {KEY}"},
            {"authorization": KEY},
            {"authorization": "Bearer"},
            {"authorization": "Bearer \u00e9\u00ff"},
            {"authorization": ""},
            {"x-api-key": KEY},
        ):
            status = guarded.request(method, path, headers=headers).status
            assert status == (200 if path == "/health" else 401), (method, path, headers)
        answer = guarded.request(method, path, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status not in (401, 500)


def test_any_of_the_keys_opens(guarded: Client) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    for key in (KEY.encode(), "schlüssel".encode()):
        assert raw(guarded, head + b"Authorization: Bearer " + key + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    twice = b"Authorization: Bearer a-secret-key\r\nAuthorization: x\r\n\r\n"
    assert raw(guarded, head + twice).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/health/../v1/models",
        "/v1/models/",
        "/v1/models?x=/health",
        "/v1/models#/health",
        "/%761/models",
        "/health%2f..%2fv1/models",
        "/HEALTH",
        "http://x/v1/models",
        "*",
        "/v1/models;/health",
    ],
)
def test_no_spelling_of_a_path_gets_around_the_key(guarded: Client, target: str) -> None:
    """CVE-2026-48746."""
    answer = raw(guarded, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert answer[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 400"), answer


@pytest.mark.parametrize("host", ["", "a b", "[::1", "x:99999999", "\u00e9", "/health", "x/health?"])
def test_odd_hosts(guarded: Client, host: str) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    assert raw(guarded, head)[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 400")


def test_a_root_path_does_not_open_anything(model: str) -> None:
    settings: dict[str, Any] = {"api_keys": (KEY,), "root_path": "/health"}
    with ServerThread(model, settings=settings, scripted=True) as server:
        assert server.get("/v1/models").status == 401
        assert server.get("/health/v1/models").status == 401
        assert server.get("/health").status == 200
        assert server.get("/v1/models", authorization=f"Bearer {KEY}").status == 200


def test_keys_are_compared_in_constant_time() -> None:
    import inspect

    source = inspect.getsource(ApiKeys)
    assert "compare_digest" in source
    assert "any([" not in source  # all keys are compared, whichever matches


def test_cors(guarded: Client, echo: Client) -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    answer = guarded.request("OPTIONS", "/v1/completions", headers=preflight)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    other = guarded.request("OPTIONS", "/v1/completions", headers=preflight | {"origin": "https://b.example"})
    assert other.status == 400
    assert "access-control-allow-origin" not in echo.get("/version", origin="https://a.example").headers
    assert echo.request("OPTIONS", "/v1/completions", headers=preflight).status == 405


# ---- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "n": 10**9}),
        ("/v1/completions", {"prompt": "a", "n": 10**9, "best_of": 10**9}),
        ("/v1/completions", {"prompt": ["a"] * 10**5}),
        ("/v1/completions", {"prompt": [[5]] * 10**5}),
        ("/v1/completions", {"prompt": [[5]] * 100, "n": 100}),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 10**5}),
        ("/v1/completions", {"prompt": "a", "bad_words": ["x"] * 10**5}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5] * 10**5}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(10**5)}}),
        ("/v1/completions", {"prompt": "a", "request_id": "x" * 10**6}),
        ("/v1/completions", {"prompt": "a", "cache_salt": "x" * 10**6}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 10**5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * 10**5}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_too_many_is_refused_at_once(echo: Client, path: str, fields: dict[str, Any]) -> None:
    """CVE-2025-48956, vllm PR#37952, vllm PR#10968."""
    seconds = []
    body = json.dumps(fields)
    for _ in range(3):
        started = time.process_time()  # of server and client; the machine may do other things too
        answer = echo.request("POST", path, body, {"content-type": "application/json"})
        seconds.append(time.process_time() - started)
        assert answer.status == 400
    assert min(seconds) < 0.2
    assert len(answer.error["message"]) < 3000


def test_headers_that_are_too_large(echo: Client) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for head in (
        b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2**26,
        b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X-Many: aaaaaaaaaaaaaaaaaaaa\r\n" * 2**20,
        b"GET /" + b"a" * 2**24,
    ):
        started = time.perf_counter()
        answer = raw(echo, head)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), answer[:100]
        assert time.perf_counter() - started < 5
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024  # KiB; the bytes that we send ourselves are among them
    assert echo.get("/version").status == 200


def test_ordinary_headers_pass(echo: Client) -> None:
    headers = {f"x-header-{i}": "v" * 100 for i in range(90)}
    assert echo.get("/version", **headers).status == 200


def test_names_of_requests(echo: Client) -> None:
    right = echo.post("/v1/completions", {"prompt": "a"}, **{"x-request-id": "my-name"})
    assert right.headers["x-request-id"] == "my-name"
    assert right.json["id"] == "cmpl-my-name"
    for name in ("x" * 129, "a b", "ü", ""):
        answer = echo.post("/v1/completions", {"prompt": "a"}, **{"x-request-id": name})
        assert answer.status == 400
    huge = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"x" * 2**20 + b"\r\n\r\n"
    assert raw(echo, huge)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
    same = [echo.post("/v1/completions", {"prompt": "a", "request_id": "same"}).status for _ in range(2)]
    assert same == [200, 200]


def test_bodies_that_are_too_large(guarded: Client) -> None:
    headers = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    declared = f"POST /v1/completions HTTP/1.1\r\n{headers}Content-Length: 99999999999\r\n\r\n{{"
    assert raw(guarded, declared.encode()).startswith(b"HTTP/1.1 413")
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    chunked = f"POST /v1/completions HTTP/1.1\r\n{headers}Transfer-Encoding: chunked\r\n\r\n".encode()
    assert raw(guarded, chunked + chunk * 64)[:12] in (b"HTTP/1.1 413", b"")
    body = b'{"prompt": "abc", "max_tokens": 3}'
    whole = chunked + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    assert raw(guarded, whole).startswith(b"HTTP/1.1 200")


def test_a_unix_socket(model: str, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    path.touch()
    with pytest.raises(PagedinferError, match="cannot listen"):
        _listen_uds(str(path))
    path.unlink()  # somebody's file, not the server's to remove
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(str(path))
    leftover.close()  # as after a server that was killed
    with Server(model, "--uds", str(path), scripted=True, wait=False) as server:
        server.wait_listening()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert server.stop() == 0
    assert not path.exists()


def listeners(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses, as /proc writes them, and ports that these processes listen at over TCP."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                sockets.add(descriptor.readlink().name)
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                address, _, port = local.partition(":")
                found.add((address, int(port, 16)))
    return found


def test_two_ranks_hear_nobody_and_end_with_the_server(model: str) -> None:
    """CVE-2025-30165, CVE-2024-11041, vllm#29565, lmdeploy#4804, vllm#55510."""
    with Server(model, "--tensor-parallel-size", "2") as server:
        pids = {server.process.pid, *server.descendants}
        assert len(pids) >= 4  # the server, the engine and two ranks
        found = listeners(pids)
        assert {address for address, _ in found} == {"0100007F"}
        for _, port in found - {("0100007F", server.port)}:
            with socket.create_connection(("127.0.0.1", port)) as intruder:
                intruder.sendall(b"\x80\x04\x95cos\nsystem\n(S'true'\ntR." * 100)
        assert raw(server, b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.").startswith(b"HTTP/1.1 400")
        assert server.complete("Hello", max_tokens=3).status == 200
        server.process.kill()
        wait_gone(server.descendants)
