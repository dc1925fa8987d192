"""Messages over a socket: their kind, their length, and bytes that are never unpickled."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum


class Kind(IntEnum):
    """What a message is; see `messages` for its contents."""

    START = 1  # to a rank: what to load
    READY = 2  # from it: the worker's limits
    STEP = 3  # to it: a batch
    RESULT = 4  # from rank 0: what a step drew
    PING = 5  # to it: how far is it?
    STATUS = 6  # from it: the answer
    FAILURE = 7  # from it: an exception has ended it
    HELLO = 8  # from another node: which of its ranks this connection belongs to


_HEADER = struct.Struct("<QB")  # bytes of the contents, kind
_MOST_BYTES = 1 << 32
_CHUNK = 1 << 16

Message = tuple[Kind, bytes]


class Channel:
    """One end of a connected stream socket, which it owns.

    Several threads may send; one may receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """So that a selector can wait for it."""
        return self._socket.fileno()

    def limit_sends(self, seconds: int) -> None:
        """`send` raises OSError if nothing is taken from a full socket for so long."""
        # The system's own limit: with Python's, receiving would wait, too, where it must not.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def send(self, kind: Kind, contents: bytes = b"") -> None:
        """Raises OSError (a ConnectionError, mostly) if nobody is there any more."""
        with self._lock:
            self._socket.sendall(_HEADER.pack(len(contents), kind) + contents)

    def receive(self, most_bytes: int = _MOST_BYTES) -> Message:
        """Waits for a message.

        Raises:
            EOFError: the other end is closed.
            ValueError: what came is no message, or longer than `most_bytes`.
        """
        while True:
            message = self._take()
            if message is not None:
                return message
            if len(self._received) > most_bytes:
                raise ValueError(f"a message must have at most {most_bytes} bytes")
            self._read(0)

    def receive_arrived(self) -> Iterator[Message]:
        """The whole messages that have arrived, without waiting for more.

        Raises:
            EOFError: the other end is closed, and all that it sent has been given.
        """
        closed = False
        try:
            while len(self._received) < _MOST_BYTES:
                self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            closed = True
        while True:
            message = self._take()
            if message is None:
                break
            yield message
        if closed:
            raise EOFError

    def close(self) -> None:
        """Ends it for both sides, also where a forked process has a copy of the socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, flags: int) -> None:
        try:
            data = self._socket.recv(_CHUNK, flags)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._received += data

    def _take(self) -> Message | None:
        received = self._received
        if len(received) < _HEADER.size:
            return None
        length, kind = _HEADER.unpack_from(received)
        end = _HEADER.size + length
        if len(received) < end:
            return None
        contents = bytes(memoryview(received)[_HEADER.size : end])
        del received[:end]
        return Kind(kind), contents
