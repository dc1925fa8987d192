"""Runs a server: its socket, its signals, its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from pagedinfer.chat_template import read_template
from pagedinfer.config import EngineConfig
from pagedinfer.errors import PagedinferError
from pagedinfer.logging import configure, get_logger
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.server.app import create_app
from pagedinfer.server.engine_handle import ENGINE_COMMAND
from pagedinfer.server.http_protocol import limited_protocol
from pagedinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from pagedinfer.server.service import Service

logger = get_logger(__name__)

_LAST_ANSWERS_SECONDS = 2  # for the errors of a dead engine to reach their clients
_MAX_FILES = 65_536
_EXIT_DEAD, _EXIT_INTERRUPTED = 1, 130


def run_server(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    shutdown_timeout: float = 30.0,
    access_log: bool = False,
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> int:
    """Serves until a signal or the engine's end, and returns the exit code.

    0 after SIGTERM, 130 after Ctrl-C, 1 if the engine could not start or died.

    Args:
        config: of the engine.
        settings: of the server.
        host, port: where to listen.
        uds: path of a Unix socket to listen at instead, open to the user alone.
        shutdown_timeout: seconds that running requests have to finish after a signal.
        access_log: log a line for each HTTP request.
        engine_command: the command line of the engine's process.

    Raises:
        PagedinferError: the address cannot be listened at.
        ValueError: there is no such model, or it is none of ours.
    """
    configure()
    if Path(config.model).exists():
        ModelConfig.from_pretrained(config.model)  # what is wrong with it is said at once
    if config.chat_template is not None:
        read_template(config.chat_template)
    _allow_many_connections()
    listener = _listen_uds(uds) if uds is not None else _listen(host, port)
    _log_settings(config, settings)
    _send_uvicorns_logs_to_ours(access_log)
    server = make_server(
        config,
        settings,
        shutdown_timeout=shutdown_timeout,
        access_log=access_log,
        engine_command=engine_command,
    )
    where = uds if uds is not None else "http://{}:{}".format(*listener.getsockname()[:2])
    logger.info("listening at %s; /health says when the model is loaded", where)
    try:
        server.run(sockets=[listener])
    finally:
        if uds is not None:
            Path(uds).unlink(missing_ok=True)
    failure = server.service.failure
    if failure is not None and not server.signalled:
        logger.error("%s", failure)
        return _EXIT_DEAD
    return _EXIT_INTERRUPTED if server.signalled == signal.SIGINT else 0


def make_server(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    shutdown_timeout: float = 30.0,
    access_log: bool = False,
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> Server:
    """A server that has yet to be run; arguments as `run_server`'s."""
    server: Server
    app = create_app(config, settings, engine_command=engine_command, on_failure=lambda: server.fail())
    server = Server(
        uvicorn.Config(
            app,
            http=limited_protocol(settings.max_header_bytes),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=access_log,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=round(shutdown_timeout) + _LAST_ANSWERS_SECONDS,
            root_path=settings.root_path,
        ),
        app.state.service,
        shutdown_timeout,
    )
    return server


class Server(uvicorn.Server):
    """uvicorn's server with signals of our own: what ends it does not come back as a signal."""

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_timeout: float) -> None:
        super().__init__(config)
        self.service = service
        self._shutdown_timeout = shutdown_timeout
        self.signalled = 0

    def fail(self) -> None:
        """Ends the server because the engine is dead; clients get their errors first."""
        self._shutdown_timeout = 0.0
        self.config.timeout_graceful_shutdown = _LAST_ANSWERS_SECONDS
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections and waits for the requests that run; those that take too long fail."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(
            self._shutdown_timeout, self.service.engine.fail_all, "the server is being shut down"
        )
        await super().shutdown(sockets)
        timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's business
            return
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.signal(kind, self._on_signal) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:
            self.service.engine.kill()
            os._exit(128 + number)
        self.signalled = number
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise PagedinferError(f"cannot listen at {host}:{port}: {error}") from error
    return listener


def _listen_uds(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
                os.unlink(path)  # left by a server that was killed
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(2048)
    except OSError as error:
        raise PagedinferError(f"cannot listen at {path}: {error}") from error
    return listener


def _allow_many_connections() -> None:
    """Each needs a file descriptor, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


def _send_uvicorns_logs_to_ours(access_log: bool) -> None:
    ours = logging.getLogger("pagedinfer").handlers
    logging.getLogger("uvicorn.error").handlers = list(ours)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").handlers = list(ours) if access_log else []
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).propagate = False


def _log_settings(config: EngineConfig, settings: ServerSettings) -> None:
    """What the server runs with; keys are counted, not shown."""
    shown = asdict(config) | asdict(settings) | {"api_keys": f"{len(settings.api_keys)} given"}
    shown["hf_token"] = None if config.hf_token is None else "given"
    logger.info("configuration: %s", ", ".join(f"{name}={value!r}" for name, value in shown.items()))
