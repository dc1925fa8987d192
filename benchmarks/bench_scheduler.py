"""What scheduling costs: CPU time a step for scheduler and BlockPool, with no model behind them.

    python benchmarks/bench_scheduler.py steps      # the distribution over a trace of steps; memory growth
    python benchmarks/bench_scheduler.py hashing    # the prefix cache on a prompt of 100,000 tokens
    python benchmarks/bench_scheduler.py admission  # admission by forecast against the best fixed cap
    python benchmarks/bench_scheduler.py tracing    # the same steps with and without a trace

`steps` keeps `--running` requests running: whenever one ends, another arrives. `admission` runs a
simulated engine, whose steps take a time linear in what they compute, so its result is the same on every
machine.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedinfer._core import BlockPool
from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler, SchedulerConfig
from pagedinfer.tracing.recorder import TracingScheduler

EOS = 2


def make_request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params: Any = SimpleNamespace(max_tokens=max_tokens, min_tokens=0, ignore_eos=False, stop_token_ids=[])
    return Request(name, prompt, params, eos_token_ids=frozenset([EOS]))


def show_distribution(what: str, seconds: npt.NDArray[np.float64]) -> None:
    microseconds = seconds * 1e6
    quantiles = np.quantile(microseconds, [0.5, 0.9, 0.99, 1.0])
    print(
        f"{what:<10} mean {microseconds.mean():7.1f}   median {quantiles[0]:7.1f}   "
        f"p90 {quantiles[1]:7.1f}   p99 {quantiles[2]:7.1f}   max {quantiles[3]:8.1f}   us a step"
    )


class Load:
    """A scheduler with `num_running` requests all the time, of prompts and outputs of these mean lengths."""

    def __init__(
        self, num_running: int, block_size: int, prompt: int, output: int, trace: str | None = None
    ) -> None:
        longest = 2 * (prompt + output)
        config = SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            block_size=block_size,
            num_blocks=-(-num_running * longest // block_size),
            max_model_len=longest,
        )
        self.scheduler = Scheduler(config) if trace is None else TracingScheduler(config, trace)
        self.num_added = 0
        self._prompt, self._output = prompt, output
        self._rng = random.Random(0)
        for _ in range(num_running):
            self._arrive()

    def _arrive(self) -> float:
        """One more request; the seconds that adding it took."""
        draw = self._rng
        self.num_added += 1
        tokens = [draw.randrange(3, 100_000) for _ in range(draw.randint(1, 2 * self._prompt - 1))]
        request = make_request(f"r{self.num_added}", tokens, draw.randint(1, 2 * self._output - 1))
        begin = time.thread_time()
        self.scheduler.add_request(request)
        return time.thread_time() - begin

    def step(self) -> tuple[float, float, float]:
        """Seconds of CPU time for its schedule, its update, and the arrivals after it."""
        begin = time.thread_time()
        batch = self.scheduler.schedule()
        scheduled = time.thread_time() - begin
        num_tokens = sum(work.sample for work in batch.requests)
        output = StepOutput(np.full(num_tokens, 7, np.int64), np.zeros(num_tokens, np.float32))
        begin = time.thread_time()
        updates = self.scheduler.update(batch, output)
        updated = time.thread_time() - begin
        arrivals = [self._arrive() for update in updates if update.finish_reason is not None]
        return scheduled, updated, sum(arrivals)


def bench_steps(make_load: Callable[[], Load], num_steps: int) -> None:
    """The distribution over steps, and whether memory grows."""
    load = make_load()
    for _ in range(num_steps // 10):
        load.step()
    seconds = np.array([load.step() for _ in range(num_steps)])
    print(f"{num_steps} steps, {load.num_added} requests in all")
    show_distribution("schedule", seconds[:, 0])
    show_distribution("update", seconds[:, 1])
    show_distribution("both", seconds[:, 0] + seconds[:, 1])

    # A second stretch at the same load, so that watching memory does not show in the times.
    tracemalloc.start()
    for _ in range(num_steps // 10):
        load.step()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(num_steps // 10):
        load.step()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"memory over {num_steps // 10} further steps: {grown / 1024:+.0f} KiB")


def bench_tracing(make_load: Callable[[str | None], Load], num_steps: int) -> None:
    """Two loads that do the same, step by step in turns; the arrivals count too."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        plain, traced = make_load(None), make_load(str(path))
        seconds = np.array([(sum(plain.step()), sum(traced.step())) for _ in range(num_steps)])
        traced.scheduler.close()  # type: ignore[attr-defined]
        num_bytes = path.stat().st_size
    show_distribution("plain", seconds[:, 0])
    show_distribution("traced", seconds[:, 1])
    cost = 1e6 * (seconds[:, 1] - seconds[:, 0])
    print(
        f"a trace costs {cost.mean():.0f} us a step on average, {np.median(cost):.0f} at the median, and "
        f"{num_bytes / num_steps:.0f} bytes: less than 2 % of steps longer than {cost.mean() / 20:.1f} ms"
    )


def bench_hashing(num_tokens: int, block_size: int) -> None:
    """A prompt goes into the prefix cache, and is looked up."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(num_tokens)]
    num_blocks = num_tokens // block_size
    pool = BlockPool(2 * num_blocks, block_size)
    table = pool.allocate(num_blocks)
    inserts, matches = [], []
    for _ in range(20):
        pool.reset_cache()
        begin = time.thread_time()
        pool.insert(table, 0, num_blocks, tokens)
        inserted = time.thread_time()
        pool.match(tokens, num_blocks)
        inserts.append(inserted - begin)
        matches.append(time.thread_time() - inserted)
    into, found = 1e3 * float(np.median(inserts)), 1e3 * float(np.median(matches))
    print(f"{num_tokens} tokens in blocks of {block_size}: cached in {into:.2f} ms, found in {found:.2f} ms")


class SimulatedEngine:
    """Time per step: fixed, plus a part per decoded and per prefilled token, plus one per swapped block."""

    def __init__(self, scheduler: Scheduler, lengths: dict[str, int]) -> None:
        self.scheduler = scheduler
        self.lengths = lengths  # output tokens after which a request draws EOS
        self.seconds = 0.0

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if batch.is_empty():
            return
        num_decodes = sum(work.num_tokens == 1 for work in batch.requests)
        num_moved = len(batch.swaps_out) + len(batch.swaps_in)
        self.seconds += 6e-3 + 2e-5 * num_decodes + 4e-5 * (batch.num_tokens - num_decodes) + 4e-5 * num_moved
        self.scheduler.update(batch, self.output(batch))

    def output(self, batch: Batch) -> StepOutput:
        tokens = []
        for work in batch.requests:
            if work.sample:
                request = self.scheduler.requests[work.request_id]
                is_last = request.num_output_tokens + 1 >= self.lengths[work.request_id]
                tokens.append(EOS if is_last else 7)
        return StepOutput(np.array(tokens, np.int64), np.zeros(len(tokens), np.float32))


def simulate(
    cap: int, admission_policy: Any, preemption_mode: Any, max_tokens: int | None, seed: int = 0
) -> tuple[float, Scheduler]:
    """Tokens generated per simulated second by 2,000 requests, with KV memory for about 200 of them."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(50, 500, 2000)
    outputs = np.minimum(rng.lognormal(5.7, 0.7, 2000).astype(int) + 1, 2000)
    config = SchedulerConfig(
        max_num_seqs=cap,
        max_num_batched_tokens=4096,
        num_blocks=200 * (275 + 190) // 16,
        num_cpu_blocks=4000,
        max_model_len=4700,
        admission_policy=admission_policy,
        preemption_mode=preemption_mode,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(config)
    lengths = {}
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        name = f"r{i}"
        lengths[name] = int(output)
        limit = int(output) if max_tokens is None else max_tokens
        scheduler.add_request(make_request(name, [5] * int(prompt), limit))
    engine = SimulatedEngine(scheduler, lengths)
    while scheduler.has_unfinished_requests():
        engine.step()
    return scheduler.counters.num_generated_tokens / engine.seconds, scheduler


def bench_admission() -> None:
    def run(label: str, *arguments: Any) -> float:
        rate, scheduler = simulate(*arguments)
        print(f"  {label:<44} {rate:8.0f} tokens/s   {scheduler.counters.num_preemptions:5d} preemptions")
        return rate

    for mode in ("swap", "recompute"):
        print(f"preemption_mode={mode}")
        best = max(
            run(f"whatever fits, at most {cap}", cap, "greedy", mode, 4096)
            for cap in (100, 140, 160, 180, 200, 220, 260, 320, 512)
        )
        rate = run("forecast, at most 512, max_tokens=4096", 512, "forecast", mode, 4096)
        exact = run("forecast, at most 512, max_tokens exact", 512, "forecast", mode, None)
        print(f"  forecast / best cap: {rate / best:.3f}; max_tokens=4096 / exact: {rate / exact:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["steps", "hashing", "admission", "tracing"]
    parser.add_argument("what", nargs="?", choices=[*parts, "all"], default="all")
    parser.add_argument("--running", type=int, default=256, help="requests that run at once")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="mean length of a prompt")
    parser.add_argument("--output-tokens", type=int, default=256, help="mean length of an output")
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the engine does: collections need not look at what the imports left

    def make_load(trace: str | None = None) -> Load:
        lengths = arguments.prompt_tokens, arguments.output_tokens
        return Load(arguments.running, arguments.block_size, *lengths, trace)

    for part in parts if arguments.what == "all" else [arguments.what]:
        if part == "steps":
            bench_steps(make_load, arguments.steps)
        elif part == "hashing":
            bench_hashing(100_000, arguments.block_size)
        elif part == "admission":
            bench_admission()
        else:
            bench_tracing(make_load, arguments.steps)


if __name__ == "__main__":
    main()
