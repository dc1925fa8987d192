"""Hundreds of streams for a minute on a real, tiny model: nothing lost, repeated or mixed up; memory flat.

Every answer is compared with that of a run of its request alone.

    python -m tests.server.trials.load [--streams 500] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pagedinfer import LLM, SamplingParams
from tests.server.rig import Client, Server
from tests.tiny_models import make_llama

OPTIONS = {"device": "cpu", "num_gpu_blocks_override": 1024, "max_num_seqs": 64}
FLAGS = ["--device", "cpu", "--num-gpu-blocks-override", "1024", "--max-num-seqs", "64"]


class Load(NamedTuple):
    """What came of it."""

    num_requests: int
    num_tokens: int
    num_left: int  # requests whose client went away in the middle
    faults: list[str]
    memory_early: int  # KiB that both processes held after a third of the time
    memory_late: int  # and at the end

    def __str__(self) -> str:
        return (
            f"{self.num_requests:,} requests, {self.num_left:,} of them left by their clients, "
            f"{self.num_tokens:,} tokens; {len(self.faults)} faults; "
            f"memory {self.memory_early / 1024:.0f} MiB, then {self.memory_late / 1024:.0f} MiB"
        )


def requests(count: int) -> list[dict[str, Any]]:
    """Requests of many kinds, each with its one right answer."""
    rng = random.Random(0)
    found = []
    for seed in range(count):
        body: dict[str, Any] = {
            "prompt": [rng.randrange(3, 320) for _ in range(rng.randint(1, 60))],
            "max_tokens": rng.randint(1, 48),
            "seed": seed,
        }
        kind = rng.randrange(5)
        if kind == 0:
            body["temperature"] = 0.0
        elif kind == 1:
            body |= {"stop": ["e", "th"], "repetition_penalty": 1.2}
        elif kind == 2:
            body |= {"n": 3, "top_p": 0.9}
        elif kind == 3:
            body |= {"top_k": 20, "min_tokens": 1}
        found.append(body)
    return found


def run(model: str, *, streams: int, seconds: float, num_kinds: int = 100) -> Load:
    """Keeps so many streams open for so long."""
    bodies = requests(num_kinds)
    right = alone(model, bodies)
    with Server(model, *FLAGS) as server:
        pids = (server.process.pid, server.engine_pid())
        found = asyncio.run(Clients(server, pids, bodies, right).run(streams, seconds))
        assert server.text("Hello", max_tokens=3) is not None
        assert server.stop() == 0
    return found


def alone(model: str, bodies: list[dict[str, Any]]) -> list[list[tuple[str, str | None]]]:
    """The texts and finish_reasons of the choices of each request, run by itself."""
    right = []
    with LLM(model, **OPTIONS) as llm:  # type: ignore[arg-type]
        for body in bodies:
            params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
            [output] = llm.generate({"prompt_token_ids": body["prompt"]}, params, use_tqdm=False)
            right.append([(choice.text, choice.finish_reason) for choice in output.outputs])
    return right


class Clients:
    """Clients of a server that ask at random, compare, and sometimes leave.

    Args:
        server: of the model.
        pids: the processes whose memory is looked at.
        bodies: requests, and in `right` what comes of each alone.
    """

    def __init__(
        self, server: Client, pids: Sequence[int], bodies: list[dict[str, Any]], right: list[Any]
    ) -> None:
        self._server = server
        self._pids = pids
        self._bodies = bodies
        self._right = right
        self._faults: list[str] = []
        self._num_requests = self._num_tokens = self._num_left = 0

    async def run(self, streams: int, seconds: float) -> Load:
        """Keeps so many streams open for so long."""
        until = time.monotonic() + seconds
        clients = [asyncio.create_task(self._client(i, until)) for i in range(streams)]
        await asyncio.sleep(seconds / 3)
        early = self._memory()
        await asyncio.gather(*clients)
        late = self._memory()
        await asyncio.sleep(0.5)
        for name in ("running", "waiting", "in_flight"):
            if self._server.metric(f"pagedinfer_num_requests_{name}"):
                self._faults.append(f"num_requests_{name} is not 0 at the end")
        if self._server.metric("pagedinfer_kv_cache_usage_perc"):
            self._faults.append("blocks are held at the end")
        return Load(self._num_requests, self._num_tokens, self._num_left, self._faults, early, late)

    async def _client(self, number: int, until: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            index = rng.randrange(len(self._bodies))
            leaves = rng.random() < 0.05
            try:
                texts, reasons, count = await self._ask(self._bodies[index], leaves)
            except (OSError, EOFError, ValueError) as error:
                self._faults.append(f"request {index}: {type(error).__name__}: {error}")
                continue
            self._num_requests += 1
            self._num_tokens += count
            self._num_left += leaves
            choices = [(texts.get(i, ""), reasons.get(i)) for i in range(self._bodies[index].get("n", 1))]
            if not leaves and choices != self._right[index]:
                self._faults.append(f"request {index} gave {choices}, alone {self._right[index]}")

    async def _ask(self, body: dict[str, Any], leaves: bool) -> tuple[dict[int, str], dict[int, str], int]:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        count = 0
        try:
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            if b" 200 " not in await reader.readline():
                raise ValueError((await reader.read(1000)).decode(errors="replace"))
            async for line in reader:
                if line == b"data: [DONE]\n":
                    return texts, reasons, count
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    count = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    index = choice["index"]
                    if index in reasons:
                        raise ValueError("a choice went on after its end")
                    texts[index] = texts.get(index, "") + choice["text"]
                    if choice["finish_reason"]:
                        reasons[index] = choice["finish_reason"]
                if leaves:
                    return texts, reasons, count
            raise EOFError("the stream ended before [DONE]")
        finally:
            writer.close()

    def _memory(self) -> int:
        """KiB that the server's processes hold."""
        total = 0
        for pid in self._pids:
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder))
        load = run(folder, **vars(arguments))
    print(load)
    for fault in load.faults[:10]:
        print(fault)
    raise SystemExit(bool(load.faults) or load.memory_late > 1.1 * load.memory_early)


if __name__ == "__main__":
    main()
