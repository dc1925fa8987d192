"""A hub on the loopback: as much of its protocol as the client needs, and its failures on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee00" * 5


class FakeHub:
    """Serves a folder as one model, "owner/name", at the revisions "main" and "v1"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: Counter[str] = Counter()
        """How often each path was asked for, as "GET config.json"."""
        self.ranges: list[str] = []
        """The Range headers of downloads."""
        self.tokens: set[str | None] = set()
        self.gated = False
        self.failures: Counter[str] = Counter()
        """How often a request is still to be answered with HTTP 503, by the same keys."""
        self.cuts: Counter[str] = Counter()
        """How often a download is still to break off in the middle, by the file's name."""
        self.stall = threading.Event()
        """Clear: requests get no answer until it is set."""
        self.stall.set()
        self.closed = False
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        """Answers nothing any more, on open connections either. Harmless when repeated."""
        self.closed = True
        self.stall.set()
        self._server.shutdown()
        self._server.server_close()

    def downloaded(self) -> set[str]:
        """The files that were fetched."""
        return {key.removeprefix("GET ") for key in self.requests if key.startswith("GET ")} - {"files"}


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub = self.owner
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if listing else ("/".join(parts[:2]), parts[2:])
        revision = rest[1] if len(rest) > 1 else "main"
        name = "files" if listing else "/".join(rest[2:])
        key = f"{self.command} {name}"
        hub.requests[key] += 1
        hub.tokens.add(self.headers.get("Authorization"))
        hub.stall.wait(30)
        if hub.closed:
            self.close_connection = True
            return
        if hub.failures[key] > 0:
            hub.failures[key] -= 1
            self._send(503, {})
        elif repo != "owner/name":
            self._send(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        elif listing:
            names = sorted(
                str(file.relative_to(hub.folder)) for file in hub.folder.rglob("*") if file.is_file()
            )
            siblings = [{"rfilename": each} for each in names]
            self._send(200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        elif hub.gated and self.headers.get("Authorization") != "Bearer right":
            self._send(403, {"X-Error-Code": "GatedRepo"})
        elif not (hub.folder / name).is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self._send_file(name, (hub.folder / name).read_bytes(), with_body=with_body)

    def _send_file(self, name: str, content: bytes, *, with_body: bool) -> None:
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status, begin = 200, 0
        if "Range" in self.headers:
            self.owner.ranges.append(self.headers["Range"])
            begin = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        body = content[begin:]
        if with_body and self.owner.cuts[name] > 0:
            self.owner.cuts[name] -= 1
            self._send(status, headers, body[: len(body) // 2], length=len(body))
            self.close_connection = True
        else:
            self._send(status, headers, body if with_body else b"", length=len(body))

    def _send(
        self, status: int, headers: dict[str, str], body: bytes = b"", length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""
