"""How well a replay predicts: real runs with several limits, each predicted from the traces of the others.

    python benchmarks/bench_replay.py                      # Llama 3 8B's shape, on a GPU
    python benchmarks/bench_replay.py --model tiny --device cpu
    python benchmarks/bench_replay.py --traces a.json b.json    # predictions alone, of runs that were kept

Also what tracing costs: a run of the first limits without a trace. The throughput is of output tokens,
without start-up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_preemption import TINY
from model_shapes import write_shape

from pagedinfer import LLM, SamplingParams
from pagedinfer.tracing.reader import read_trace
from pagedinfer.tracing.records import Added, Trace
from pagedinfer.tracing.simulation import simulate, traced_run

NUM_REQUESTS = {"llama-3-8b": 384, "tiny": 240}
LIMITS = {  # of the runs
    "llama-3-8b": [
        {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "num_blocks": 40000},
        {"max_num_seqs": 64, "max_num_batched_tokens": 16384, "num_blocks": 40000},
        {"max_num_seqs": 256, "max_num_batched_tokens": 512, "num_blocks": 40000},
    ],
    "tiny": [
        {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_blocks": 1024},
        {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "num_blocks": 1024},
        {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "num_blocks": 1024},
        {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_blocks": 160},
    ],
}


def workload(num_requests: int, vocab_size: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts of 64 to 256 tokens, outputs of 50 to 200."""
    draw = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": draw.integers(10, vocab_size, draw.integers(64, 257)).tolist()}
        for _ in range(num_requests)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True, detokenize=False)
        for n in draw.integers(50, 201, num_requests)
    ]
    return prompts, params


@dataclass
class RealRun:
    """A run with some limits."""

    limits: dict[str, int]
    rate: float  # output tokens a second, behind the warm-up
    full_step_seconds: float  # of steps in which all slots are taken, the median; 0: not measured


def traced_rate(trace: Trace) -> float:
    """Output tokens a second of what a trace holds behind the warm-up."""
    added = measured(trace)
    last = [trace.ended[request.request_id][-1] for request in added]
    seconds = max(ended.time for ended in last) - min(request.time for request in added)
    return sum(ended.num_output_tokens for ended in last) / seconds


def measured(trace: Trace) -> list[Added]:
    """The requests behind the warm-up, which ends with an empty cache."""
    start = max(op for op, name in trace.calls if name == "reset_prefix_cache")
    return [added for added in trace.added if added.op > start]


def predict(trace: Trace, runs: list[RealRun]) -> dict[str, dict[str, float]]:
    """What a replay of a trace says of these runs."""
    _, costs, num_different = traced_run(trace)
    print(f"traced with {limits_of(trace)}: {len(trace.steps)} steps, {num_different} scheduled otherwise")
    print(f"    {costs.describe()}")
    trace = replace(trace, added=measured(trace))
    found = {}
    for run in runs:
        predicted = simulate(trace, dict(run.limits), costs, "").tokens_per_second
        ratio = predicted / run.rate
        print(
            f"    {run.limits!s:<56} predicted {predicted:8,.0f}  real {run.rate:8,.0f}  ratio {ratio:.3f}",
            flush=True,
        )
        found[str(run.limits)] = {"predicted": predicted, "real": run.rate, "ratio": ratio}
    return found


def limits_of(trace: Trace) -> dict[str, int]:
    """The limits that this benchmark varies."""
    return {name: trace.config[name] for name in ("max_num_seqs", "max_num_batched_tokens", "num_blocks")}


class Bench:
    """A model, a workload, and runs of it."""

    def __init__(self, folder: Path, num_requests: int, device: str) -> None:
        self._folder = folder
        self._device = device
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._prompts, self._params = workload(num_requests, vocab_size)

    def run(self, limits: dict[str, int], trace: Path | None) -> RealRun:
        """Runs the workload on a warm engine and an empty cache."""
        num_warm = len(self._prompts) // 4
        durations: list[float] = []
        with LLM(
            str(self._folder),
            device=self._device,  # type: ignore[arg-type]
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=512,
            swap_space=0,
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            num_gpu_blocks_override=limits["num_blocks"],
            trace=None if trace is None else str(trace),
        ) as llm:
            llm.generate(self._prompts[:num_warm], self._params[:num_warm], use_tqdm=False)
            llm.reset_prefix_cache()
            engine, step = llm.llm_engine, llm.llm_engine.step

            def timed() -> Any:
                is_full = len(engine.scheduler.running) == limits["max_num_seqs"]
                started = time.perf_counter()
                outputs = step()
                if is_full:
                    durations.append(time.perf_counter() - started)
                return outputs

            engine.step = timed  # type: ignore[method-assign]
            started = time.perf_counter()
            llm.generate(self._prompts, self._params, use_tqdm=False)
            seconds = time.perf_counter() - started
        num_tokens = sum(params.max_tokens or 0 for params in self._params)
        median = float(np.median(durations)) if durations else 0.0
        return RealRun(limits, num_tokens / seconds, median)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-8b", choices=list(LIMITS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the traces there")
    parser.add_argument("--traces", type=Path, nargs="+", metavar="FILE", help="of runs that were kept")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.traces:
            traces = [read_trace(path) for path in arguments.traces]
            runs = [RealRun(limits_of(trace), traced_rate(trace), 0.0) for trace in traces]
            results: dict[str, Any] = {}
        else:
            runs, traces, results = real_runs(arguments, folder)
    for name, value in results.items():
        print(f"{name:<28} {value:.3f}")
    results["from"] = {str(limits_of(trace)): predict(trace, runs) for trace in traces}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def real_runs(
    arguments: argparse.Namespace, folder: Path
) -> tuple[list[RealRun], list[Trace], dict[str, Any]]:
    """A traced run with each of the limits, its trace, and what tracing cost the first."""
    if arguments.model == "tiny":
        (folder / "config.json").write_text(json.dumps(TINY))
    else:
        folder = write_shape(arguments.model, folder)
    bench = Bench(folder, NUM_REQUESTS[arguments.model], arguments.device)
    limits = LIMITS[arguments.model]
    paths = [(arguments.keep or folder) / f"trace{i}.json" for i in range(len(limits))]
    runs = [bench.run(each, path) for each, path in zip(limits, paths, strict=True)]
    plain = bench.run(limits[0], None)
    results = {
        "full step ms, plain": 1e3 * plain.full_step_seconds,
        "full step ms, traced": 1e3 * runs[0].full_step_seconds,
        "traced over plain tokens/s": runs[0].rate / plain.rate,
    }
    return runs, [read_trace(path) for path in paths], results


if __name__ == "__main__":
    main()
