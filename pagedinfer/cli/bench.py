"""Measures a server under load: `pagedinfer bench serve`.

Requests with random prompts are sent at a rate, or as many as may run at once. Reported are, by vLLM's
definitions: TTFT, from sending a request to the first token; ITL, between two tokens that follow each other;
TPOT, the time after the first token over the number of tokens after it; E2EL, to the end; and goodput, the
requests a second that keep to all limits of --goodput.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.cli.parser import human_integer

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_config_argument()
    parser.add_argument("what", choices=["serve"], help="what to measure")
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="(default: http://127.0.0.1:8000)")
    add("--endpoint", default="/v1/completions", choices=["/v1/completions", "/v1/chat/completions"])
    add("--model", metavar="NAME", help="one of the server's models (default: its first)")
    add("--api-key", help="or in PAGEDINFER_API_KEY")
    add("--num-prompts", type=human_integer, default=100, metavar="N", help="requests (default: 100)")
    add("--random-input-len", type=human_integer, default=1024, metavar="N", help="(default: 1024)")
    add("--random-output-len", type=human_integer, default=128, metavar="N", help="(default: 128)")
    add("--random-prefix-len", type=human_integer, default=0, metavar="N", help="of a prefix that all share")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="lengths are uniform in [1 - X, 1 + X] times the above (default: 0)",
    )
    add("--request-rate", type=float, default=math.inf, metavar="X", help="a second (default: all at once)")
    add("--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson; less: in bursts (default: 1)")
    add("--max-concurrency", type=human_integer, metavar="N", help="requests at once (default: no limit)")
    add("--num-warmups", type=human_integer, default=1, metavar="N", help="requests before (default: 1)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (default: 0)")
    add("--no-ignore-eos", action="store_true", help="let requests end before their output length")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="more parameters of each request")
    add("--goodput", nargs="+", metavar="LIMIT", help="in ms, as ttft:200 tpot:50 e2el:5000")
    add("--save-result", metavar="FILE", help="write all figures as JSON")


def _json_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r:.80}")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table on stdout, and returns 1 if a request failed."""
    from pagedinfer.cli.http_client import HttpClient, api_key
    from pagedinfer.cli.load.report import parse_limits, report, table
    from pagedinfer.cli.load.run import run_load
    from pagedinfer.cli.load.workload import Workload

    key = api_key(arguments.api_key)
    client = HttpClient(arguments.base_url, key)
    models = client.get("/v1/models")["data"]
    names = [entry["id"] for entry in models]
    limits = parse_limits(arguments.goodput or ())
    workload = Workload(
        model=arguments.model or names[0],
        vocab_size=int(models[0].get("vocab_size", 10_000)),
        num_requests=arguments.num_prompts,
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        prefix_len=arguments.random_prefix_len,
        range_ratio=arguments.random_range_ratio,
        seed=arguments.seed,
        ignore_eos=not arguments.no_ignore_eos,
        extra_body=arguments.extra_body,
        chat=arguments.endpoint.endswith("/chat/completions"),
    )
    results, seconds = asyncio.run(
        run_load(
            workload,
            base_url=arguments.base_url,
            endpoint=arguments.endpoint,
            api_key=key,
            request_rate=arguments.request_rate,
            burstiness=arguments.burstiness,
            max_concurrency=arguments.max_concurrency,
            num_warmups=arguments.num_warmups,
        )
    )
    figures = report(results, seconds, limits)
    print(table(figures))
    failures = [result for result in results if result.error]
    for result in failures[:5]:
        print(f"failed: {result.error}", file=sys.stderr)
    if arguments.save_result:
        Path(arguments.save_result).write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if failures else 0
