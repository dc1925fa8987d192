"""What preemption, the prefix cache and priorities cost, on the whole engine with random weights.

    python benchmarks/bench_preemption.py                        # Llama 3 8B's shape, on a GPU of 80 GB
    python benchmarks/bench_preemption.py swap shared
    python benchmarks/bench_preemption.py --model tiny --device cpu

swap    A request of 2 GiB of KV is swapped out and in while others decode: GB/s each way, and how long
        the steps took.
modes   Urgent requests displace others of 4k tokens: the same run by swapping and by recomputing.
shared  256 requests that share 2,048 tokens, each with 64 of its own: prompt tokens that the runner computed.
urgent  Time to first token of urgent requests beside a batch that takes all slots, and on an idle engine.

With `tiny` all sizes are a small fraction: it shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from model_shapes import SHAPES, write_shape

from pagedinfer import LLM, SamplingParams
from pagedinfer.engine.batch import Batch, StepHandle
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sampling_params import RequestOutputKind

BLOCK = 16  # tokens


@dataclass(frozen=True)
class Sizes:
    """Tokens and requests of the parts."""

    victim: int  # tokens of the request that is swapped
    decoders: int  # requests that decode meanwhile
    chunk: int  # most tokens of one prompt in a step
    prompt: int  # of each request of `modes`
    output: int
    room: int  # of them, how many run
    displacers: int  # urgent requests that take their place
    shared: int
    own: int
    sharers: int
    slots: int  # requests that saturate the engine in `urgent`
    urgent: int  # urgent requests
    swap_gib: float


SIZES = {
    "llama-3-8b": Sizes(16384, 32, 2048, 4096, 192, 20, 24, 2048, 64, 256, 256, 50, 8.0),
    "tiny": Sizes(512, 1, 64, 128, 40, 3, 5, 128, 16, 16, 8, 10, 0.05),
}
TINY = SHAPES["llama-3-8b"] | {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


class Bench:
    """An engine's options and the prompts of one seed."""

    def __init__(self, folder: Path, sizes: Sizes, device: str) -> None:
        self.sizes = sizes
        self._folder = folder
        self._device = device
        self._vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._rng = np.random.default_rng(0)

    def llm(self, **options: Any) -> LLM:
        return LLM(
            str(self._folder),
            device=self._device,  # type: ignore[arg-type]
            load_format="dummy",
            skip_tokenizer_init=True,
            **options,
        )

    def prompt(self, length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._rng.integers(10, self._vocab_size, length).tolist()}

    def uniform(self) -> float:
        """A draw from [0, 1)."""
        return float(self._rng.random())


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def bench_swap(bench: Bench) -> dict[str, Any]:
    """A large request gives way to an urgent one as large, and comes back."""
    sizes = bench.sizes
    steps_before, output = 20, 60
    room = sizes.victim + BLOCK * (2 + sizes.decoders * (2 + 4 * output // BLOCK))
    options = {"scheduling_policy": "priority", "preemption_mode": "swap", "swap_space": sizes.swap_gib}
    with bench.llm(
        **options,
        num_gpu_blocks_override=room // BLOCK,
        max_model_len=sizes.victim + 2 * BLOCK,
        max_num_seqs=sizes.decoders + 2,
        async_scheduling=False,  # a call is a step
        long_prefill_token_threshold=sizes.chunk,
        enable_prefix_caching=False,
    ) as llm:
        engine = llm.llm_engine
        timings = record_swaps(llm)
        for i in range(sizes.decoders):
            engine.add_request(f"decoder {i}", bench.prompt(BLOCK), greedy(4 * output), 0)
        engine.add_request("victim", bench.prompt(sizes.victim - output), greedy(output), 2)
        seconds: dict[str, list[float]] = {"before": [], "swap out": [], "after": [], "swap in": []}
        while engine.has_unfinished_requests():
            victim = engine.scheduler.requests.get("victim")
            if victim is not None and len(seconds["before"]) == steps_before:
                engine.add_request("urgent", bench.prompt(sizes.victim - output), greedy(2), 1)
                seconds["before"].append(0.0)
            counters = engine.scheduler.counters
            outs, ins = counters.num_blocks_swapped_out, counters.num_blocks_swapped_in
            started = time.perf_counter()
            engine.step()
            took = time.perf_counter() - started
            if counters.num_blocks_swapped_out > outs:
                seconds["swap out"].append(took)
            elif counters.num_blocks_swapped_in > ins:
                seconds["swap in"].append(took)
            elif counters.num_blocks_swapped_in:
                seconds["after"].append(took)
            elif victim is not None and victim.num_output_tokens and not outs:
                seconds["before"].append(took)
        block_bytes = engine.worker.block_bytes
        if counters.num_preemptions_swap == 0:
            raise SystemExit("nothing was swapped")
    result: dict[str, Any] = {}
    for way, moved in timings.items():
        num_bytes = block_bytes * sum(blocks for blocks, _ in moved)
        result[f"{way} GiB"] = num_bytes / 2**30
        result[f"{way} GB/s"] = num_bytes / 1e9 / sum(seconds for _, seconds in moved)
    result["step ms, nothing swapped"] = 1e3 * float(np.median(seconds["before"]))
    result["step ms that begins a swap out (and a prompt)"] = 1e3 * max(seconds["swap out"])
    result["step ms with a swap in"] = 1e3 * max(seconds["swap in"])
    return result


def record_swaps(llm: LLM) -> dict[str, list[tuple[int, float]]]:
    """Fills with (blocks, seconds) of the swaps, by their way: one swap out, and later one in."""
    timings: dict[str, list[tuple[int, float]]] = {"out": [], "in": []}
    worker = llm.llm_engine.worker
    take = worker.take_swap_timings
    counters = llm.llm_engine.scheduler.counters

    def recorded() -> list[tuple[int, float]]:
        taken = take()
        timings["in" if counters.num_blocks_swapped_in else "out"].extend(taken)
        return taken

    worker.take_swap_timings = recorded  # type: ignore[method-assign]
    return timings


def bench_modes(bench: Bench) -> dict[str, Any]:
    """Requests that take all slots, of which urgent ones displace one after another, in both modes."""
    sizes = bench.sizes
    prompts = [bench.prompt(sizes.prompt) for _ in range(sizes.room)]
    urgent = [bench.prompt(4 * BLOCK) for _ in range(sizes.displacers)]
    seconds: dict[str, list[float]] = {"recompute": [], "swap": []}
    with bench.llm(
        scheduling_policy="priority",
        swap_space=sizes.swap_gib,
        max_model_len=sizes.prompt + sizes.output,
        max_num_seqs=sizes.room,
        enable_prefix_caching=False,  # it would find again what was dropped
    ) as llm:
        engine = llm.llm_engine
        limits = engine.scheduler.config

        def run(mode: Any, num_urgent: int) -> float:
            """Seconds from when all of the batch decode."""
            scheduler = engine.scheduler = Scheduler(replace(limits, preemption_mode=mode))
            scheduler.running.release_all_slots()
            scheduler.costs.block_bytes = engine.worker.block_bytes
            for i, prompt in enumerate(prompts):
                engine.add_request(f"batch {i}", prompt, greedy(sizes.output), 1)
            while scheduler.waiting or any(r.num_output_tokens < 2 for r in scheduler.running):
                engine.step()
            started = time.perf_counter()
            first, num_arrived = scheduler.counters.num_steps, 0
            while engine.has_unfinished_requests():
                if num_arrived < num_urgent and scheduler.counters.num_steps >= first + 4 * num_arrived:
                    engine.add_request(f"urgent {num_arrived}", urgent[num_arrived], greedy(2), 0)
                    num_arrived += 1
                engine.step()
            if scheduler.counters.num_preemptions < num_urgent:
                raise SystemExit("urgent requests displaced nobody")
            return time.perf_counter() - started

        run("swap", 1)
        for _ in range(2):
            for mode, runs in seconds.items():
                runs.append(run(mode, sizes.displacers))
    result: dict[str, Any] = {f"{mode} s": float(np.mean(runs)) for mode, runs in seconds.items()}
    result["urgent requests"] = sizes.displacers
    result["recompute over swap"] = result["recompute s"] / result["swap s"]
    return result


def bench_shared(bench: Bench) -> dict[str, Any]:
    """All at once, on an empty cache."""
    sizes = bench.sizes
    shared = bench.prompt(sizes.shared)["prompt_token_ids"]
    prompts = [
        {"prompt_token_ids": shared + bench.prompt(sizes.own)["prompt_token_ids"]}
        for _ in range(sizes.sharers)
    ]
    length = sizes.shared + sizes.own
    with bench.llm(max_num_seqs=sizes.sharers, max_model_len=length + BLOCK) as llm:
        worker = llm.llm_engine.worker
        execute = worker.execute
        computed = 0

        def counted(batch: Batch) -> StepHandle:
            nonlocal computed
            computed += sum(max(0, min(r.start + r.num_tokens, length) - r.start) for r in batch.requests)
            return execute(batch)

        worker.execute = counted  # type: ignore[method-assign]
        started = time.perf_counter()
        llm.generate(prompts, greedy(8), use_tqdm=False)
        seconds = time.perf_counter() - started
    return {
        "prompt tokens computed": computed,
        "prompt tokens to compute at least": sizes.shared + sizes.sharers * sizes.own,
        "prompt tokens": sizes.sharers * length,
        "s": seconds,
    }


def bench_urgent(bench: Bench) -> dict[str, Any]:
    """Urgent requests of 128 tokens, one after another."""
    sizes = bench.sizes
    with bench.llm(scheduling_policy="priority", max_num_seqs=sizes.slots, max_model_len=768) as llm:
        engine = llm.llm_engine

        def first_tokens(name: str) -> list[float]:
            latencies = []
            for i in range(sizes.urgent):
                wait_until = engine.scheduler.counters.num_steps + 3  # what the last one displaced may return
                while engine.has_unfinished_requests() and engine.scheduler.counters.num_steps < wait_until:
                    engine.step()
                # It arrives at any moment of the next steps, and is seen when the engine's call is over.
                arrived = time.perf_counter() + 0.02 * bench.uniform()
                while (missed := time.perf_counter() - arrived) < 0:
                    engine.step()
                engine.add_request(f"{name} {i}", bench.prompt(128), greedy(1), 0)
                waiting = True
                while waiting:
                    for output in engine.step():
                        if output.request_id == f"{name} {i}":
                            latencies.append(missed + output.metrics.first_token_latency)
                            waiting = False
            return latencies

        first_tokens("warm-up")
        idle = first_tokens("idle")
        as_a_server = RequestOutputKind.DELTA
        for i in range(2 * sizes.slots):
            engine.add_request(f"batch {i}", bench.prompt(128), greedy(600), 1, output_kind=as_a_server)
        while len(engine.scheduler.running) < sizes.slots:
            engine.step()
        for _ in range(5):
            engine.step()
        num_tokens, started = engine.scheduler.counters.num_generated_tokens, time.perf_counter()
        busy = first_tokens("urgent")
        num_tokens = engine.scheduler.counters.num_generated_tokens - num_tokens
        rate = num_tokens / (time.perf_counter() - started)
        stats = llm.get_metrics()
        if stats.waiting_reason is None:
            raise SystemExit("the engine was not saturated to the end")
    result: dict[str, Any] = {}
    for name, latencies in (("idle", idle), ("saturated", busy)):
        result[f"{name} p50 ms"], result[f"{name} p99 ms"] = (
            1e3 * float(np.percentile(latencies, percent)) for percent in (50, 99)
        )
    result["p99 over p99 of an idle engine"] = result["saturated p99 ms"] / result["idle p99 ms"]
    result["preemptions"] = stats.counters.num_preemptions
    result["tokens/s beside the urgent ones"] = rate
    return result


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "swap": bench_swap,
    "modes": bench_modes,
    "shared": bench_shared,
    "urgent": bench_urgent,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--model", default="llama-3-8b", choices=list(SIZES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as scratch:
        if args.model == "tiny":
            folder = Path(scratch)
            (folder / "config.json").write_text(json.dumps(TINY))
        else:
            folder = write_shape(args.model, Path(scratch))
        results = {}
        for part in args.parts:
            started = time.perf_counter()
            results[part] = PARTS[part](Bench(folder, SIZES[args.model], args.device))
            print(f"{part} ({time.perf_counter() - started:.0f} s with loading)")
            for name, value in results[part].items():
                print(
                    f"    {name:<48} {value:,.2f}"
                    if isinstance(value, float)
                    else f"    {name:<48} {value:,}"
                )
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
