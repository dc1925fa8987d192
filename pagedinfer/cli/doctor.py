"""Says which parameters to change, from what a server or a short probe measures.

    pagedinfer doctor --url http://127.0.0.1:8000          # reads a server's /metrics
    pagedinfer doctor MODEL --max-num-seqs 64              # starts an engine with these flags, and loads it
    pagedinfer doctor MODEL --requests 200 --prompt-tokens 1k --output-tokens 200

The rules are those of docs/tuning.md. The exit code is 1 if there is something to change.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from pagedinfer.cli.engine_arguments import add_engine_arguments, engine_config
from pagedinfer.cli.parser import human_integer

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser
    from pagedinfer.engine.advice import Facts

_TIMEOUT = 10.0  # seconds for a server to answer


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    group = parser.add_argument_group("doctor")
    group.add_argument("--url", help="of a server; reads its /metrics")
    group.add_argument("--api-key", help="of that server (default: $PAGEDINFER_API_KEY)")
    for name, default, meaning in (
        ("requests", 32, "that the probe sends at once"),
        ("prompt-tokens", 128, "of each of them"),
        ("output-tokens", 64, "of each of them"),
        ("seconds", 60, "after which the probe is cut off"),
    ):
        text = f"{meaning} (default: {default})"
        group.add_argument(f"--{name}", type=human_integer, default=default, metavar="N", help=text)
    group.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what to change; 1 if there is anything."""
    from pagedinfer.engine.advice import advise

    if (arguments.url is None) == (arguments.model is None):
        raise ValueError("name a model to probe, or a server with --url, and not both")
    facts = _probe(arguments) if arguments.url is None else _read(arguments)
    found = advise(facts)
    if arguments.json:
        fields = ("rule", "parameter", "value", "why")
        print(json.dumps([{name: getattr(advice, name) for name in fields} for advice in found], indent=2))
        return 1 if found else 0
    print(_summary(facts))
    for advice in found:
        print(f"{advice.rule}: try {advice}.")
    if not found:
        print("Nothing to change.")
    return 1 if found else 0


def _summary(facts: Facts) -> str:
    limited = ", ".join(f"{count:,} for {reason}" for reason, count in facts.limited_steps.items() if count)
    return (
        f"{facts.num_steps:,} steps, {facts.num_finished:,} requests finished, {facts.num_preemptions:,} "
        f"preemptions; steps in which a request waited: {limited or 'none'}"
    )


def _probe(arguments: argparse.Namespace) -> Facts:
    from pagedinfer.engine.engine import LLMEngine
    from pagedinfer.planning.probe import Load, probe

    load = Load(arguments.requests, arguments.prompt_tokens, arguments.output_tokens, arguments.seconds)
    engine = LLMEngine(engine_config(arguments))
    try:
        return probe(engine, load)
    finally:
        engine.close()


def _read(arguments: argparse.Namespace) -> Facts:
    from pagedinfer.cli.http_client import HttpClient, api_key
    from pagedinfer.planning.server_facts import facts_from_metrics

    url = arguments.url.rstrip("/").removesuffix("/metrics")
    client = HttpClient(url, api_key(arguments.api_key), timeout=_TIMEOUT)
    return facts_from_metrics(client.text("/metrics"))
