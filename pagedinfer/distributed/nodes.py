"""Ranks on several machines: node 0 has the engine, and the others lend it the ranks that they start.

Node 0 listens at master_addr:master_port. Each other node starts its ranks, with two connections for each to
node 0, and has no more to say: when those connections end, the ranks do. The machines must trust their
network: what is said on it is neither encrypted nor signed.
"""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import suppress

from pagedinfer.config import EngineConfig
from pagedinfer.distributed.channel import Channel, Kind
from pagedinfer.distributed.messages import Hello, decode_hello, encode
from pagedinfer.distributed.ranks import end_processes, spawn_on
from pagedinfer.errors import EngineStartError
from pagedinfer.logging import configure, get_logger

logger = get_logger(__name__)

_SECONDS_BETWEEN_TRIES = 0.5
_SECONDS_TO_SAY_HELLO = 10
_SECONDS_TO_END = 10.0
_SECONDS_TO_FIND_EACH_OTHER = 600.0

Connections = dict[tuple[int, bool], Channel]
"""By rank, and whether it is the one for control."""


def ranks_on_each_node(config: EngineConfig) -> int:
    """How many ranks each node has."""
    return config.tensor_parallel_size // config.nnodes


class NodeListener:
    """Where the other nodes' ranks connect to.

    Raises:
        EngineStartError: nothing can listen at master_addr:master_port.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._place = f"{config.master_addr}:{config.master_port}"
        try:
            self._socket = socket.create_server((config.master_addr, config.master_port))
        except OSError as error:
            raise EngineStartError(
                f"the other nodes cannot reach this one at {self._place}: {error}; master_addr must be an "
                f"address of this machine, and master_port one that is free"
            ) from None

    def accept(self) -> Connections:
        """Waits until all ranks of the other nodes are connected.

        Raises:
            EngineStartError: they are not after ten minutes, or do not fit this engine.
        """
        per_node = ranks_on_each_node(self._config)
        wanted = {
            (rank, is_control)
            for rank in range(per_node, self._config.tensor_parallel_size)
            for is_control in (False, True)
        }
        connections: Connections = {}
        deadline = time.monotonic() + _SECONDS_TO_FIND_EACH_OTHER
        logger.info("waiting for %d other nodes at %s", self._config.nnodes - 1, self._place)
        while wanted - connections.keys():
            self._socket.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = sorted({rank // per_node for rank, _ in wanted - connections.keys()})
                raise EngineStartError(
                    f"the nodes {', '.join(map(str, missing))} have not come to {self._place}"
                ) from None
            greeted = _greet(connection)
            if greeted is None:
                continue
            channel, hello = greeted
            if hello.num_local_ranks != per_node or not 1 <= hello.node < self._config.nnodes:
                channel.close()
                raise EngineStartError(
                    f"node {hello.node} has {hello.num_local_ranks} ranks; there are "
                    f"{self._config.nnodes} nodes with {per_node} each: give all the same nnodes and "
                    f"tensor_parallel_size"
                )
            place = hello.node * per_node + hello.local_rank, hello.is_control
            if place in connections:
                channel.close()
                raise EngineStartError(f"two nodes say that they are node {hello.node}")
            connections[place] = channel
        return connections

    def close(self) -> None:
        """Nobody else can connect from here on."""
        self._socket.close()


def _greet(connection: socket.socket) -> tuple[Channel, Hello] | None:
    """Hears who a connection is from; None, and it is closed: from nobody who knows how to say that."""
    connection.settimeout(_SECONDS_TO_SAY_HELLO)
    _notice_dead_peers(connection)
    channel = Channel(connection)
    try:
        kind, contents = channel.receive(most_bytes=1000)
        if kind != Kind.HELLO:
            raise ValueError(f"expected {Kind.HELLO!r}")
        hello = decode_hello(contents)
    except (EOFError, OSError, ValueError):
        channel.close()
        return None
    connection.settimeout(None)
    return channel, hello


def run_node(config: EngineConfig) -> int:
    """Lends the ranks of this machine, node `config.node_rank`, to the engine on node 0; the exit code.

    Returns once the engine has ended.

    Raises:
        EngineStartError: node 0 cannot be reached for ten minutes.
    """
    configure()
    count = ranks_on_each_node(config)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank in range(count):
            sockets = []
            for is_control in (False, True):
                connection = _connect(config.master_addr, config.master_port)
                hello = Hello(config.node_rank, local_rank, count, is_control)
                # Neither closes the socket, which goes to the rank's process.
                Channel(connection).send(Kind.HELLO, encode(hello))
                sockets.append(connection)
            processes.append(spawn_on(sockets))
        logger.info("node %d: %d ranks for the engine at %s", config.node_rank, count, config.master_addr)
        codes = [process.wait() for process in processes]
        return 0 if not any(codes) else 1
    finally:
        end_processes(processes, _SECONDS_TO_END if processes else 0.0)


def _connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _SECONDS_TO_FIND_EACH_OTHER
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_SECONDS_TO_SAY_HELLO)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineStartError(f"node 0 cannot be reached at {host}:{port}: {error}") from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
            continue
        connection.settimeout(None)
        _notice_dead_peers(connection)
        return connection


def _notice_dead_peers(connection: socket.socket) -> None:
    """Small messages go at once, and a machine that is gone without a word is noticed within ten seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)):
        with suppress(AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
