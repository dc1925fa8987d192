"""What serving adds to a step of the engine: 256 streams on a tiny model, beside `LLM.generate` of the same.

Compared is CPU time a step, which other work on the machine does not change much, and time on the clock. Each
way generates a few tokens and then more, and what the further ones take counts. The server's engine is held
up until all requests have come, so that all are in all steps.

    python -m tests.server.trials.steps [--streams 256] [--tokens 64] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from pagedinfer import LLM, SamplingParams
from tests.server.rig import Server
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


_FEW = 16


class Seconds(NamedTuple):
    """What something took of a process."""

    cpu: float
    clock: float


def a_step(few: Seconds, many: Seconds, tokens: int) -> Seconds:
    """What each of `tokens` steps took by which one run was longer than another."""
    return Seconds((many.cpu - few.cpu) / tokens, (many.clock - few.clock) / tokens)


def prompts(streams: int) -> list[list[int]]:
    return [[3 + (7 * i + 13 * j) % 300 for j in range(8)] for i in range(streams)]


def offline(model: str, streams: int, tokens: int, repeats: int) -> Iterator[Seconds]:
    """A step of `LLM.generate` of all of them."""
    torch.set_num_threads(1)
    with LLM(model, **OPTIONS) as llm:  # type: ignore[arg-type]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts(streams)]

        def generate(max_tokens: int) -> Seconds:
            params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
            cpu, clock = time.process_time(), time.perf_counter()
            llm.generate(inputs, params, use_tqdm=False)
            return Seconds(time.process_time() - cpu, time.perf_counter() - clock)

        generate(_FEW)
        for _ in range(repeats):
            yield a_step(generate(_FEW), generate(_FEW + tokens), tokens)


def served(model: str, streams: int, tokens: int, repeats: int) -> Iterator[Seconds]:
    """A step of the engine's process, while it serves all of them as streams; the clock is that of steps."""
    with Server(model, *FLAGS) as server:
        engine = server.engine_pid()

        def now() -> tuple[float, float, float]:
            names = ("pagedinfer_engine_steps_total", "pagedinfer_engine_busy_seconds_total")
            return *map(server.metric, names), exact_cpu_seconds(engine)

        def generate(max_tokens: int) -> Seconds:
            before = now()
            asyncio.run(_read_all(server, streams, max_tokens))
            time.sleep(0.3)  # for the last report
            steps, clock, cpu = (b - a for a, b in zip(before, now(), strict=True))
            assert steps == max_tokens, "a step without some of the streams"
            return Seconds(cpu, clock)

        generate(_FEW)
        for _ in range(repeats):
            yield a_step(generate(_FEW), generate(_FEW + tokens), tokens)


def exact_cpu_seconds(pid: int) -> float:
    """That the threads of a process have used so far."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


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

    async def release() -> None:
        while await asyncio.to_thread(server.metric, "pagedinfer_num_requests_in_flight") < streams:
            await asyncio.sleep(0.02)
        os.kill(server.engine_pid(), signal.SIGCONT)

    os.kill(server.engine_pid(), signal.SIGSTOP)
    await asyncio.gather(release(), *map(read, prompts(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder))
        ways = [measure(folder, **vars(arguments)) for measure in (offline, served)]
        for steps in zip(*ways, strict=True):
            for name, step in zip(("offline", "served"), steps, strict=True):
                print(f"{name}: {1000 * step.cpu:.2f} ms of CPU a step, {1000 * step.clock:.2f} on the clock")
            print(f"served over offline: {steps[1].cpu / steps[0].cpu:.3f} of CPU", flush=True)


if __name__ == "__main__":
    main()
