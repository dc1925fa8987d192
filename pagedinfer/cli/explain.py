"""Says why a request of a trace waited, was preempted, was slow or was refused, step by step.

    pagedinfer explain trace.json --request 17
    pagedinfer explain trace.json               # which requests there are, the slowest first

A trace is written by LLM(trace="trace.json") and by `pagedinfer serve --trace trace.json`.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser
    from pagedinfer.tracing.records import Trace

_MOST_LISTED = 20


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_argument("file", help="a trace")
    parser.add_argument("--request", metavar="ID", help="the request to explain")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation on stdout."""
    from pagedinfer.tracing.explain import explain
    from pagedinfer.tracing.reader import read_trace

    trace = read_trace(arguments.file)
    lines = _list(trace) if arguments.request is None else explain(trace, arguments.request)
    print(json.dumps(lines, indent=2) if arguments.json else "\n".join(lines))
    return 0


def _list(trace: Trace) -> list[str]:
    """The requests that took longest, one a line."""
    found = []
    for added in trace.added:
        ended = next((e for e in trace.ended.get(added.request_id, []) if e.op > added.op), None)
        if ended is not None:
            found.append((ended.time - added.time, added, ended))
    found.sort(key=lambda item: -item[0])
    lines = [
        f"{added.request_id}: {seconds:.3f} s, {added.num_prompt_tokens:,} prompt tokens, "
        f"{ended.num_output_tokens:,} generated, {ended.reason}"
        for seconds, added, ended in found[:_MOST_LISTED]
    ]
    left = len(trace.added) - len(lines)
    lines += [f"{name}: refused" for _, name, _ in trace.refused]
    if left:
        lines.append(f"and {left:,} more")
    lines.append("`--request ID` explains one")
    return lines
