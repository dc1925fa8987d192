"""Runs the requests of a trace again, on the real scheduler and with other parameters, without a model.

    pagedinfer replay trace.json --max-num-seqs 512
    pagedinfer replay trace.json --max-num-seqs 64 128 256 --num-blocks 20000 --plot runs.png

How long a step takes comes from a cost model that is fitted to the trace, so that throughput, waits and
preemptions of the runs can be compared. A parameter with several values gives a run for each. First the trace
is scheduled once more as it was, which has to give the same steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import TYPE_CHECKING, Any

from pagedinfer.cli.parser import human_integer

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser

_NUMBERS = {
    "max_num_seqs": "requests that run at once",
    "max_num_batched_tokens": "tokens of a step",
    "num_blocks": "KV blocks on the device",
    "num_cpu_blocks": "KV blocks on the CPU, to swap to",
    "max_model_len": "tokens of the longest request",
    "long_prefill_token_threshold": "tokens of one prompt in a step; 0: no limit",
}
_CHOICES = {
    "scheduling_policy": ("fcfs", "priority"),
    "preemption_mode": ("auto", "swap", "recompute"),
    "admission_policy": ("forecast", "greedy"),
}
_SWITCHES = {
    "enable_prefix_caching": "share the KV of prompts that begin alike",
    "enable_chunked_prefill": "compute long prompts in chunks",
}


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_argument("file", help="a trace")
    for name, meaning in _NUMBERS.items():
        parser.add_argument(_flag(name), type=human_integer, nargs="+", metavar="N", help=meaning)
    for name, choices in _CHOICES.items():
        parser.add_argument(_flag(name), nargs="+", choices=choices)
    for name, meaning in _SWITCHES.items():
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=meaning)
    parser.add_argument(
        "--watermark", type=float, nargs="+", metavar="SHARE", help="of the KV cache kept free"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw running and waiting requests over time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints a table of the runs; 1 if the trace could not be scheduled as it was."""
    from pagedinfer.tracing import comparison
    from pagedinfer.tracing.reader import read_trace
    from pagedinfer.tracing.simulation import simulate, traced_run

    trace = read_trace(arguments.file)
    traced, costs, num_different = traced_run(trace)
    runs = [traced]
    for changes in _variants(arguments):
        name = ", ".join(f"{key}={value}" for key, value in changes.items()) or "simulated"
        runs.append(simulate(trace, changes, costs, name))
    if arguments.json:
        table = {
            name: dict(zip((r.name for r in runs), values, strict=True))
            for name, values in comparison.rows(runs)
        }
        same = {"steps": len(trace.steps), "scheduled otherwise": num_different}
        print(json.dumps({"replay": same, "costs": costs.seconds, "runs": table}, indent=2))
    else:
        again = "the same schedule" if not num_different else f"{num_different:,} STEPS SCHEDULED OTHERWISE"
        print(f"Replayed {len(trace.steps):,} steps with the trace's own parameters: {again}.")
        print(f"Cost model: {costs.describe()}.\n")
        print(comparison.text(runs))
        if trace.refused:
            print(
                "Requests that were refused and are not replayed, since the trace lacks their lengths: "
                f"{len(trace.refused):,}"
            )
    if arguments.plot:
        comparison.plot(runs, arguments.plot)
    return 1 if num_different else 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variants(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The changed parameters of each run; with none given, one run as it was."""
    given: dict[str, list[Any]] = {}
    for name in (*_NUMBERS, *_CHOICES, *_SWITCHES, "watermark"):
        value = getattr(arguments, name)
        if value is not None:
            given[name] = value if isinstance(value, list) else [value]
    return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]
