"""How well a replay predicts: a traced run, its replay with other limits, and real runs with those limits.

    python benchmarks/bench_replay.py                      # Llama 3 8B's shape, on a GPU
    python benchmarks/bench_replay.py --model tiny --device cpu

Also what tracing costs: the same run with and without. The throughput is of output tokens, without start-up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_preemption import TINY
from model_shapes import write_shape

from pagedinfer import LLM, SamplingParams
from pagedinfer.tracing.reader import read_trace
from pagedinfer.tracing.simulation import simulate, traced_run

SIZES = {  # requests, slots of the traced run, slots of the others, blocks of a smaller cache
    "llama-3-8b": (256, 256, (64,), 2600),
    "tiny": (80, 32, (8, 4), 160),
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


class Bench:
    """A model, a workload, and runs of it."""

    def __init__(self, folder: Path, num_requests: int, device: str) -> None:
        self._folder = folder
        self._device = device
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._prompts, self._params = workload(num_requests, vocab_size)
        self.num_tokens = sum(params.max_tokens or 0 for params in self._params)

    def run(self, **options: Any) -> float:
        """Output tokens a second; the workload runs twice, the second time warm and on an empty cache."""
        with LLM(
            str(self._folder),
            device=self._device,  # type: ignore[arg-type]
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=512,
            **options,
        ) as llm:
            for _ in range(2):
                llm.reset_prefix_cache()
                started = time.perf_counter()
                llm.generate(self._prompts, self._params, use_tqdm=False)
                seconds = time.perf_counter() - started
        return self.num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-8b", choices=list(SIZES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    num_requests, slots, fewer, num_blocks = SIZES[arguments.model]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.model == "tiny":
            (folder / "config.json").write_text(json.dumps(TINY))
        else:
            folder = write_shape(arguments.model, folder)
        bench = Bench(folder, num_requests, arguments.device)
        path = Path(scratch) / "trace.json"
        plain = bench.run(max_num_seqs=slots)
        traced_rate = bench.run(max_num_seqs=slots, trace=str(path))
        trace = read_trace(path)
        # The second time alone: the first warms up.
        second = sorted(trace.added, key=lambda added: added.op)[num_requests].op
        _, costs, num_different = traced_run(trace)
        results["steps"], results["scheduled otherwise"] = len(trace.steps), num_different
        results["traced over plain"] = traced_rate / plain
        results["bytes of trace a step"] = path.stat().st_size / len(trace.steps)
        print(f"{len(trace.steps)} steps, {num_different} scheduled otherwise; {costs.describe()}")
        print(
            f"plain {plain:,.0f} tok/s, traced {traced_rate:,.0f}; {results['bytes of trace a step']:.0f} "
            "B a step"
        )
        trace.added = [added for added in trace.added if added.op >= second]
        variants: list[dict[str, Any]] = [
            {},
            *({"max_num_seqs": n} for n in fewer),
            {"num_blocks": num_blocks},
        ]
        for changes in variants:
            options = {"max_num_seqs": slots, **changes}
            if "num_blocks" in options:
                options["num_gpu_blocks_override"] = options.pop("num_blocks")
            real = bench.run(**options)
            predicted = simulate(trace, changes, costs, "").tokens_per_second
            name = json.dumps(changes)
            results[name] = {"predicted": predicted, "real": real, "ratio": predicted / real}
            print(
                f"{name:<28} predicted {predicted:10,.0f}  real {real:10,.0f}  ratio {predicted / real:.3f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
