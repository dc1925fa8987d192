"""Requests that arrive at random times: time to first token and time between tokens, at several rates.

    python benchmarks/bench_online.py --model llama-3-8b --rates 15,30,45,55 --seconds 12
    python benchmarks/bench_online.py --model FOLDER --rates 1,2 --seconds 10

Arrivals are Poisson; prompts of 64 to 256 token ids, 100 to 300 tokens out, greedy, EOS ignored, all from one
seed. One thread adds the requests that have arrived and runs the engine's steps. TTFT counts from the moment
at which a request arrives, whatever the engine does then; ITL are the gaps between a request's tokens, all of
them pooled. A rate whose requests pile up is beyond saturation: the last column says how long after the last
arrival the last request ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_engine import machine
from model_shapes import SHAPES, write_shape

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds from the beginning
    prompt: list[int]
    num_tokens: int  # to generate


def arrivals(rate: float, seconds: float, vocab_size: int) -> list[Arrival]:
    """The requests of `seconds` seconds, `rate` a second on average; the same for the same arguments."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 2) + 10))
    low, high = min(1000, vocab_size // 4), min(100_000, vocab_size)
    return [
        Arrival(
            float(at),
            rng.integers(low, high, rng.integers(64, 257)).tolist(),
            int(rng.integers(100, 301)),
        )
        for at in times[times < seconds]
    ]


def run(engine: Any, work: Sequence[Arrival]) -> dict[str, Any]:
    """Serves the requests at their times."""
    from pagedinfer import SamplingParams
    from pagedinfer.sampling_params import RequestOutputKind

    waiting = deque(enumerate(work))
    due: dict[str, float] = {}  # when each arrived
    last: dict[str, float] = {}  # when its last token came
    first_gaps: list[float] = []
    gaps: list[float] = []
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while waiting and waiting[0][1].at <= now:
            number, arrival = waiting.popleft()
            params = SamplingParams(
                temperature=0.0, max_tokens=arrival.num_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(
                str(number),
                {"prompt_token_ids": arrival.prompt},
                params,
                output_kind=RequestOutputKind.DELTA,
            )
            due[str(number)] = arrival.at
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1].at - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            name = output.request_id
            if name in last:
                gaps.append(now - last[name])
            else:
                first_gaps.append(now - due[name])
            last[name] = now
    seconds = time.perf_counter() - start
    num_tokens = len(first_gaps) + len(gaps)
    return {
        "requests": len(work),
        "seconds": seconds,
        "output_tok_s": num_tokens / seconds,
        "ttft_ms": percentiles(first_gaps),
        "itl_ms": percentiles(gaps),
        "seconds_after_last_arrival": seconds - work[-1].at,
    }


def percentiles(seconds: list[float]) -> dict[int, float]:
    """Milliseconds."""
    return {p: 1e3 * float(np.percentile(seconds, p)) for p in PERCENTILES}


def print_row(rate: float, row: dict[str, Any]) -> None:
    columns = [f"{row[name][p]:8.1f}" for name in ("ttft_ms", "itl_ms") for p in PERCENTILES]
    print(
        f"{rate:11g}{row['requests']:10}{row['output_tok_s']:14,.0f}  {''.join(columns)}"
        f"{row['seconds_after_last_arrival']:8.1f} s",
        flush=True,
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Percentiles over the rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = [row["rate"] for row in results["rows"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, name, title in zip(
        axes, ("ttft_ms", "itl_ms"), ("time to first token", "time between tokens"), strict=True
    ):
        for p in PERCENTILES:
            axis.plot(rates, [row[name][p] for row in results["rows"]], marker="o", label=f"p{p}")
        axis.set(title=title, xlabel="requests a second", ylabel="ms", ylim=(0, None))
        axis.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, or one of " + ", ".join(SHAPES))
    parser.add_argument("--rates", default="1,2,4", help="requests a second, comma-separated")
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals, for each rate")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-async-scheduling", action="store_true", help="steps do not overlap")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--plot", type=Path, help="draw them here")
    args = parser.parse_args()

    from pagedinfer import LLMEngine
    from pagedinfer.config import EngineConfig

    results: dict[str, Any] = {"machine": machine(), "model": args.model, "rows": []}
    with tempfile.TemporaryDirectory() as scratch:
        random_weights = args.model in SHAPES
        folder = write_shape(args.model, Path(scratch)) if random_weights else Path(args.model)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        engine = LLMEngine(
            EngineConfig(
                model=str(folder),
                dtype=args.dtype,
                device=args.device,
                load_format="dummy" if random_weights else "auto",
                max_model_len=1024,
                skip_tokenizer_init=True,
                async_scheduling=False if args.no_async_scheduling else None,
            )
        )
        run(engine, arrivals(max(map(float, args.rates.split(","))), 0.5, vocab_size))  # warm-up
        print(
            "requests/s  requests  output tok/s  TTFT p50     p90     p99 ITL p50     p90     p99 ms   over"
        )
        for rate in map(float, args.rates.split(",")):
            engine.reset_prefix_cache()
            row = run(engine, arrivals(rate, args.seconds, vocab_size))
            results["rows"].append({"rate": rate, **row})
            print_row(rate, row)
        engine.close()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
