"""The engine's process, seen from the one that starts it: messages to it, messages from it, its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

import pagedinfer
from pagedinfer.logging import get_logger
from pagedinfer.server import messages as wire
from pagedinfer.server.engine_process import Launch, address

logger = get_logger(__name__)

ENGINE_COMMAND = (sys.executable, "-P", "-m", "pagedinfer.server.engine_process")
_LONGEST_FOLDER = 80  # a Unix socket's path has at most 107 bytes
_LAST_WORDS_SECONDS = 0.2


class EngineHandle:
    """Starts an engine process and holds the connection to it: a socket in a folder of the user's own.

    Args:
        config: parameters of an EngineConfig.
        command: what to start, to which a folder is added; see `pagedinfer.server.engine_process.serve`.
    """

    def __init__(self, config: dict[str, Any], command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._config = config
        self._command = command
        self._folder = ""
        self._process: asyncio.subprocess.Process | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(wire.FromEngine)

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None before it is started."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Starts the process. It says `Ready` or `StartFailed` when it has loaded."""
        folder = tempfile.mkdtemp(prefix="pagedinfer-")  # mode 0700
        if len(folder) > _LONGEST_FOLDER:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="pagedinfer-", dir="/tmp")
        self._folder = folder
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(folder))
        package_root = str(Path(pagedinfer.__file__).parents[1])
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=2,  # our stdout is for data
            start_new_session=True,  # Ctrl-C reaches this process alone
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Launch(self._config)) + b"\n")

    def send(self, message: wire.ToEngine) -> None:
        """Sends at once, without waiting; lost if the process has ended."""
        if self._socket is None or self._socket.closed:
            return
        asyncio.ensure_future(
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        ).add_done_callback(_ignore_error)

    async def messages(self) -> AsyncIterator[wire.FromEngine]:
        """What the engine says, until its process ends."""
        assert self._socket is not None
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while not ended.done():
                received = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({received, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not received.done():  # it has ended, perhaps with a last message on its way
                    await asyncio.wait({received}, timeout=_LAST_WORDS_SECONDS)
                if not received.done():
                    received.cancel()
                    break
                yield self._decoder.decode(received.result())
                while await self._socket.poll(0):
                    yield self._decoder.decode(await self._socket.recv())
        finally:
            ended.cancel()

    async def stop(self, timeout: float = 5.0) -> None:
        """Asks the process to end, and kills it if it has not after `timeout` seconds."""
        process = self._process
        if process is not None and process.returncode is None:
            self.send(wire.Shutdown())
            try:
                await asyncio.wait_for(process.wait(), timeout)
            except TimeoutError:
                logger.warning("the engine did not end within %g s and is killed", timeout)
                process.kill()
                await process.wait()
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def close(self) -> None:
        """Closes the socket and removes its folder; nobody may be reading messages any more."""
        if self._socket is not None:
            self._socket.close()
        if self._context is not None:
            self._context.term()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _ignore_error(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()
