"""Two nodes, which are two programs on this machine, through its loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from pagedinfer import LLM, EngineDeadError, EngineStartError, SamplingParams
from pagedinfer.cli.main import main as serve
from pagedinfer.config import EngineConfig
from pagedinfer.distributed.channel import Channel, Kind
from pagedinfer.distributed.messages import Hello, encode
from pagedinfer.distributed.node import main
from pagedinfer.distributed.nodes import NodeListener
from tests.conftest import TinyModel
from tests.distributed.processes import all_end, rank_pids
from tests.distributed.test_faults import generate_for_ever
from tests.models.parity import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
}
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts((5, 33))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def start_node(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pagedinfer.distributed.node", "-tp", "2", "--nnodes", "2"]
    command += ["--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_two_nodes(tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one rank; then a rank of the other node is killed, and the other node ends, too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    port = free_port()
    node = start_node(port)
    llm = LLM(tiny_llama.path, **OPTIONS, tensor_parallel_size=2, nnodes=2, master_port=port)
    found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    assert found == wanted
    assert len(rank_pids(llm)) == 1
    [remote] = children(node.pid)
    pids = [node.pid, remote, *rank_pids(llm)]
    threading.Timer(0.2, os.kill, (remote, signal.SIGKILL)).start()
    with pytest.raises(EngineDeadError, match=r"rank 1 \(another node\) ended, or its connection did"):
        generate_for_ever(llm)
    assert node.wait(10) == 1
    assert all_end(pids, 1.0)
    llm.close()


def test_sizes_and_places_that_do_not_fit(tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="must be a multiple of nnodes, 2"):
        EngineConfig(model="m", tensor_parallel_size=3, nnodes=2)
    with pytest.raises(ValueError, match="node_rank must be an integer from 0 to 1, got 2"):
        EngineConfig(model="m", tensor_parallel_size=2, nnodes=2, node_rank=2)
    with pytest.raises(ValueError, match="the engine runs on node 0, and this is node 1"):
        LLM(tiny_llama.path, **OPTIONS, tensor_parallel_size=2, nnodes=2, node_rank=1)
    assert main(["-tp", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]) == 2
    assert "node 0 is the one that makes the LLM" in capsys.readouterr().err


def test_serve_on_another_node_lends_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[EngineConfig] = []
    monkeypatch.setattr("pagedinfer.distributed.nodes.run_node", lambda config: lent.append(config) or 0)
    command = ["serve", "m", "-tp", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]
    assert serve(command) == 0
    assert (lent[0].tensor_parallel_size, lent[0].node_rank, lent[0].master_addr) == (4, 1, "10.0.0.1")


def listen() -> tuple[NodeListener, int]:
    port = free_port()
    return NodeListener(EngineConfig(model="m", tensor_parallel_size=2, nnodes=2, master_port=port)), port


def test_an_address_that_is_not_ours() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, nnodes=2, master_addr="192.0.2.1")
    with pytest.raises(EngineStartError, match=r"cannot reach this one at 192\.0\.2\.1:29500"):
        NodeListener(config)


def greet(port: int, hello: Hello) -> Channel:
    channel = Channel(socket.create_connection(("127.0.0.1", port)))
    channel.send(Kind.HELLO, encode(hello))
    return channel


def test_strangers_are_hung_up_on_and_nodes_of_another_size_refused() -> None:
    listener, port = listen()
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n" * 100)
    strangers[1].close()
    greet(port, Hello(1, 0, 1, False))
    greet(port, Hello(1, 0, 2, True))
    with pytest.raises(EngineStartError, match="node 1 has 2 ranks; there are 2 nodes with 1 each"):
        listener.accept()
    listener.close()


def test_nodes_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedinfer.distributed.nodes._SECONDS_TO_FIND_EACH_OTHER", 0.2)
    listener, port = listen()
    started = time.monotonic()
    with pytest.raises(EngineStartError, match=f"the nodes 1 have not come to 127.0.0.1:{port}"):
        listener.accept()
    assert time.monotonic() - started < 5.0
    listener.close()
    command = ["-tp", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1"]
    assert main([*command, "--master-port", str(port)]) == 2
