"""What serving adds to a step of the engine: 256 streams on a tiny model, beside `LLM.generate` of the same.

Compared is CPU time a step, which other work on the machine does not change, and time on the clock.

    python -m tests.server.trials.steps [--streams 256] [--tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from pagedinfer import LLM, SamplingParams
from tests.server.rig import Server
from tests.server.trials.streams import cpu_seconds
from tests.tiny_models import make_llama

OPTIONS = {
    "device": "cpu",
    "num_gpu_blocks_override": 4096,
    "max_num_seqs": 256,
    "enable_prefix_caching": False,
}
FLAGS = [
    *("--device", "cpu", "--num-gpu-blocks-override", "4096", "--max-num-seqs", "256"),
    "--no-enable-prefix-caching",
]


class Step(NamedTuple):
    """Milliseconds for a token of each stream: a step, if all streams are in it."""

    cpu: float
    clock: float


def prompts(streams: int) -> list[list[int]]:
    return [[3 + (7 * i + 13 * j) % 300 for j in range(8)] for i in range(streams)]


def offline(model: str, streams: int, tokens: int) -> Step:
    """`LLM.generate` of all of them."""
    torch.set_num_threads(1)
    params = SamplingParams(seed=1, max_tokens=tokens, ignore_eos=True)
    with LLM(model, **OPTIONS) as llm:  # type: ignore[arg-type]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts(streams)]
        llm.generate(inputs[:8], params, use_tqdm=False)
        cpu, clock = time.process_time(), time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return Step(
            1000 * (time.process_time() - cpu) / tokens, 1000 * (time.perf_counter() - clock) / tokens
        )


def served(model: str, streams: int, tokens: int) -> Step:
    """The engine's process, while it serves all of them as streams."""
    with Server(model, *FLAGS) as server:
        server.complete("Hello", max_tokens=8)
        engine = server.engine_pid()

        def now() -> tuple[float, float]:
            return server.metric("pagedinfer_engine_busy_seconds_total"), cpu_seconds(engine)

        before = now()
        asyncio.run(_read_all(server, streams, tokens))
        time.sleep(0.3)  # for the last report
        busy, cpu = (b - a for a, b in zip(before, now(), strict=True))
        return Step(1000 * cpu / tokens, 1000 * busy / tokens)


async def _read_all(server: Server, streams: int, tokens: int) -> None:
    async def read(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 1, "stream": True}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(data) + data)
        answer = await reader.read()
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-100:]
        writer.close()

    await asyncio.gather(*map(read, prompts(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder))
        for name, measure in (("offline", offline), ("served", served)):
            step = measure(folder, **vars(arguments))
            print(f"{name}: {step.cpu:.2f} ms of CPU a step, {step.clock:.2f} ms on the clock", flush=True)


if __name__ == "__main__":
    main()
