"""Which kernels a step of the engine runs, and how long each takes: the table to look at before tuning.

    python benchmarks/bench_step.py --model llama-3-8b --steps 200x300,256x1000,256x64+2048,60x300~160
    python benchmarks/bench_step.py --model llama-3-8b --steps 60x300~160 --enforce-eager

`RxC` are decodes of R requests that each have some C tokens; `RxC+S` of requests whose first S tokens are
shared and the next C are their own; `RxC~P` steps in which a prompt of P tokens joins R decodes. Kernels are
timed by torch's profiler, in steps that overlap as always. `wall` is the time of a step without the profiler;
what is missing to it in the sum of the kernels are gaps between them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_engine import machine
from model_shapes import SHAPES, write_shape


@dataclass(frozen=True)
class Kind:
    """What the steps hold."""

    name: str
    requests: int
    own: int  # tokens of each request
    shared: int  # tokens before them
    prompt: int  # tokens of the prompt that joins

    @classmethod
    def parse(cls, name: str) -> Kind:
        found = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?(?:~(\d+))?", name)
        if found is None:
            raise SystemExit(f"--steps: {name!r} is not RxC, RxC+S or RxC~P")
        return cls(name, *(int(group or 0) for group in found.groups()))


class Steps:
    """Requests that an engine decodes, and prompts that join them."""

    def __init__(self, llm: Any, kind: Kind, vocab_size: int) -> None:
        self._engine, self._kind = llm.llm_engine, kind
        self._rng, self._vocab_size = np.random.default_rng(0), vocab_size
        self._names: list[str] = []
        llm.reset_prefix_cache()
        shared = self._prompt(kind.shared)
        for _ in range(kind.requests):
            self._add(shared + self._prompt(kind.own), 10_000)
        while any(request.num_output_tokens < 3 for request in self._engine.scheduler.requests.values()):
            self._engine.step()

    def _prompt(self, length: int) -> list[int]:
        return self._rng.integers(10, self._vocab_size, length).tolist()

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        from pagedinfer import SamplingParams

        name = str(len(self._names))
        self._names.append(name)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def run(self, count: int) -> float:
        """Runs so many steps; the seconds of one, in the median where prompts join."""
        seconds = []
        for _ in range(count):
            if self._kind.prompt:
                self._add(self._prompt(self._kind.prompt), 1)
            begin = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds))

    def end(self) -> None:
        for name in self._names:
            self._engine.abort_request(name)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def kernel_times(steps: Steps, count: int) -> list[dict[str, Any]]:
    """Microseconds and launches of a step by kernel, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        steps.run(count)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.device_time)
    rows = [
        {"kernel": name, "us": sum(times) / count, "launches": len(times) / count}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def short(name: str) -> str:
    """A kernel's name without what it shares with the others of its kind."""
    name = re.sub(r"\(anonymous namespace\)::|void |at::native::|pagedinfer::|cutlass::", "", name)
    return name[:90]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, or one of " + ", ".join(SHAPES))
    parser.add_argument("--steps", default="200x300,256x1000", help="kinds of steps, comma-separated")
    parser.add_argument("--count", type=int, default=20, help="steps of each kind")
    parser.add_argument("--rows", type=int, default=14, help="kernels to show")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--disable-cascade-attn", action="store_true", help="read shared prefixes for each")
    parser.add_argument("--no-profile", action="store_true", help="the time of a step alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = [Kind.parse(name) for name in args.steps.split(",")]

    from pagedinfer import LLM

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shape(args.model, Path(scratch)) if args.model in SHAPES else Path(args.model)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        longest = max(kind.own + kind.shared + kind.prompt for kind in kinds)
        llm = LLM(
            str(folder),
            load_format="dummy" if args.model in SHAPES else "auto",
            max_model_len=longest + 1024,
            skip_tokenizer_init=True,
            enforce_eager=args.enforce_eager,
            disable_cascade_attn=args.disable_cascade_attn,
        )
    results: dict[str, Any] = {"machine": machine(), "model": args.model, "steps": {}}
    with llm:
        for kind in kinds:
            steps = Steps(llm, kind, vocab_size)
            steps.run(5)
            wall = 1e6 * steps.run(args.count)
            kernels = [] if args.no_profile else kernel_times(steps, args.count)
            steps.end()
            total = sum(row["us"] for row in kernels)
            print(f"{kind.name}: {wall:,.0f} us a step, of which kernels {total:,.0f}")
            for row in kernels[: args.rows]:
                print(f"    {row['us']:9,.1f} us {row['launches']:7.1f} x  {short(row['kernel'])}")
            sys.stdout.flush()
            results["steps"][kind.name] = {"wall us": wall, "kernels": kernels}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
