"""A client of servers with OpenAI's interface, on the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pagedinfer.errors import PagedinferError

API_KEY_VARIABLE = "PAGEDINFER_API_KEY"


def api_key(given: str | None) -> str | None:
    """The key to send: the one that was given, else that of the environment."""
    return given or os.environ.get(API_KEY_VARIABLE)


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where a server is."""

    is_tls: bool
    host: str
    port: int
    netloc: str
    """Host and port, as they were given."""
    prefix: str
    """What precedes the paths of its routes."""

    @classmethod
    def parse(cls, url: str) -> ServerUrl:
        """From such as "127.0.0.1:8000", "http://127.0.0.1:8000" or "https://host/prefix/v1".

        Raises:
            ValueError: another scheme, no host, or a port that there is not.
        """
        needed = f"a URL such as http://127.0.0.1:8000 is needed, got {url!r}"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{needed}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(needed)
        is_tls = parts.scheme == "https"
        port = port or (443 if is_tls else 80)
        return cls(is_tls, parts.hostname, port, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"))


class ServerError(PagedinferError):
    """A server that cannot be reached, or says that something is wrong."""


class HttpClient:
    """Sends requests to one server.

    Args:
        url: see `ServerUrl`.
        api_key: sent with every request.
        timeout: seconds to wait for the server to say anything.

    Raises:
        ValueError: as `ServerUrl.parse`.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self._url = ServerUrl.parse(url)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def get(self, path: str) -> Any:
        """The JSON at a path; raises ServerError."""
        try:
            return json.loads(self.text(path))
        except ValueError as error:
            raise self._unreachable(error) from error

    def text(self, path: str) -> str:
        """The text at a path; raises ServerError."""
        connection = self._connection()
        try:
            return self._send(connection, "GET", path, None).read().decode()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def first_model(self) -> str:
        """The name of the first model that is served; raises ServerError."""
        try:
            return str(self.get("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{self._url.netloc} lists no models") from error

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream; raises ServerError. The request ends when the iterator is closed."""
        connection = self._connection()
        try:
            for line in self._send(connection, "POST", path, json.dumps(body | {"stream": True})):
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(str(event["error"].get("message", event["error"])))
                yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        url = self._url
        if url.is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(url.host, url.port, timeout=self._timeout, context=context)
        return http.client.HTTPConnection(url.host, url.port, timeout=self._timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> http.client.HTTPResponse:
        connection.request(method, self._url.prefix + path, body, self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ServerError(f"{response.status}: {_message(response.read()) or response.reason}")
        return response

    def _unreachable(self, error: Exception) -> ServerError:
        return ServerError(f"{self._url.netloc} cannot be talked to: {error or type(error).__name__}")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
