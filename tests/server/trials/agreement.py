"""`pagedinfer bench serve` beside guidellm: the same server, the same load, and the medians of both.

guidellm is no dependency of anything here: install it in an environment of its own and say where its command
is. Both must agree where the server is as fast for one as for the other: the scripted engine, its steps of
a fixed length, with one request at a time and with a queue. Two loads are for information, and the server's
own figures stand beside each tool's: several requests at once with a slot for each, where TTFT is shorter the
later in a step a tool sends its next request; and a random model, whose steps become longer when a tool takes
the cores that they run on.

    pip install guidellm==0.8.1
    python -m tests.server.trials.agreement [--guidellm COMMAND]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.server.rig import Server
from tests.tiny_models import make_llama


class Load(NamedTuple):
    """What both ask for."""

    name: str
    must_agree: bool
    concurrency: int
    slots: int
    input_len: int
    output_len: int
    num_requests: int
    cache_salt: str = ""  # what the scripted engine shall do; none: a real engine


LOADS = (
    Load("100 ms steps, 1 at once", True, 1, 4, 64, 8, 16, "slow:0.1"),
    Load("20 ms steps, a queue", True, 8, 4, 64, 32, 40, "slow:0.02"),
    Load("50 ms steps, 4 at once", False, 4, 4, 64, 16, 24, "slow:0.05"),
    Load("random model, 4 at once", False, 4, 16, 64, 32, 40),
)

# By the name in bench serve: guidellm's name, what its values are times to be milliseconds, and the server's
# own. guidellm's "inter token latency" is one value a request, without the first token: it is TPOT.
METRICS = {
    "ttft": ("time_to_first_token_ms", 1.0, "time_to_first_token_seconds"),
    "tpot": ("inter_token_latency_ms", 1.0, "request_time_per_output_token_seconds"),
    "e2el": ("request_latency", 1000.0, "e2e_request_latency_seconds"),
}


class Run(NamedTuple):
    """Milliseconds, by metric."""

    medians: dict[str, float]
    means: dict[str, float]
    server_means: dict[str, float]  # by the server's own metrics; a warm-up's request is among them


class Pair(NamedTuple):
    """A load by both tools."""

    load: Load
    ours: Run
    theirs: Run

    def difference(self, metric: str) -> float:
        """Our median over theirs, less one."""
        return self.ours.medians[metric] / self.theirs.medians[metric] - 1

    def __str__(self) -> str:
        lines = []
        for metric in METRICS:
            line = f"{self.load.name:<26}{metric.upper():<8}"
            line += f"{self.ours.medians[metric]:>10.2f}{self.theirs.medians[metric]:>10.2f}"
            line += f"{100 * self.difference(metric):>+8.1f} %"
            if not self.load.must_agree:
                for name, run in (("bench serve", self.ours), ("guidellm", self.theirs)):
                    line += f"; mean by {name} {run.means[metric]:.2f}, then by the server"
                    line += f" {run.server_means[metric]:.2f}"
            lines.append(line)
        return "\n".join(lines)


Figures = tuple[dict[str, float], dict[str, float]]


def bench_serve(url: str, load: Load, folder: Path) -> Figures:
    """The medians and means that bench serve reports."""
    result = folder / "ours.json"
    words = [sys.executable, "-m", "pagedinfer", "bench", "serve", "--base-url", url]
    words += ["--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)]
    words += ["--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)]
    words += ["--extra-body", json.dumps(_extra(load)), "--save-result", str(result)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    figures = json.loads(result.read_text())
    _check(load, figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"])
    medians, means = (
        {metric: figures[f"{kind}_{metric}_ms"] for metric in METRICS} for kind in ("median", "mean")
    )
    return medians, means


def guidellm(command: str, url: str, load: Load, model: str, folder: Path) -> Figures:
    """The medians and means that guidellm reports."""
    result = folder / "theirs.json"
    result.unlink(missing_ok=True)
    backend: dict[str, Any] = {"kind": "openai_http", "target": url, "request_format": "/v1/completions"}
    backend["extras"] = {"body": _extra(load)}
    words = [command, "run", "--disable-console", "--backend", json.dumps(backend)]
    words += ["--profile", f"kind=concurrent,streams={load.concurrency}"]
    words += ["--constraint", f"kind=max_requests,count={load.num_requests}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={model}"]
    lengths = f"prompt_tokens={load.input_len},output_tokens={load.output_len}"
    words += ["--data", f"kind=synthetic_text,{lengths}", "--output", f"kind=json,path={result}"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    [benchmark] = json.loads(result.read_text())["benchmarks"]
    good = benchmark["requests"]["successful"]
    tokens = [sum(request[f"{side}_tokens"] for request in good) for side in ("prompt", "output")]
    _check(load, len(good), *tokens)
    medians, means = (
        {
            ours: factor * benchmark["metrics"][theirs]["successful"][kind]
            for ours, (theirs, factor, _) in METRICS.items()
        }
        for kind in ("median", "mean")
    )
    return medians, means


def _extra(load: Load) -> dict[str, Any]:
    return {"temperature": 0.0} | ({"cache_salt": load.cache_salt} if load.cache_salt else {})


def _check(load: Load, num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
    """Both must have asked for the same, and got it."""
    assert num_requests == load.num_requests
    assert num_output_tokens == load.num_requests * load.output_len
    assert abs(num_prompt_tokens / (load.num_requests * load.input_len) - 1) < 0.05, num_prompt_tokens


def compare(command: str, load: Load, model: str) -> Pair:
    """Runs one after the other."""
    flags = ["--max-num-seqs", str(load.slots), "--no-enable-prefix-caching"]
    with (
        Server(model, *flags, scripted=bool(load.cache_salt)) as server,
        tempfile.TemporaryDirectory() as name,
    ):
        url, folder = f"http://127.0.0.1:{server.port}", Path(name)
        server.complete("Hello", max_tokens=8)

        def sums() -> dict[str, tuple[float, float]]:
            return {
                metric: (server.metric(f"vllm:{name}_sum"), server.metric(f"vllm:{name}_count"))
                for metric, (_, _, name) in METRICS.items()
            }

        def run(tool: Callable[[], Figures]) -> Run:
            before = sums()
            medians, means = tool()
            after = sums()
            seen = {
                metric: 1000 * (after[metric][0] - before[metric][0]) / (after[metric][1] - before[metric][1])
                for metric in METRICS
            }
            return Run(medians, means, seen)

        ours = run(lambda: bench_serve(url, load, folder))
        theirs = run(lambda: guidellm(command, url, load, model, folder))
    return Pair(load, ours, theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guidellm", default="guidellm", help="its command (default: guidellm)")
    parser.add_argument("--limit", type=float, default=0.1, help="of the differences (default: 0.1)")
    arguments = parser.parse_args()
    apart = 0
    print(f"{'median, ms':<34}{'bench':>10}{'guidellm':>10}")
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder), hidden_size=512, intermediate_size=1536, num_hidden_layers=4)
        for load in LOADS:
            pair = compare(arguments.guidellm, load, folder)
            print(pair, flush=True)
            if load.must_agree:
                apart += sum(abs(pair.difference(metric)) > arguments.limit for metric in METRICS)
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
