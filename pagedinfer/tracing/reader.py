"""Reads a trace file back."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedinfer.tracing.records import FORMAT, Added, Ended, StepRecord, Trace


def read_trace(path: str | Path) -> Trace:
    """All of a trace file; a last line that was cut off is left out.

    Raises:
        ValueError: there is no such file, or it is no trace of ours, or one of a newer format.
    """
    path = Path(path)
    try:
        events = _events(path)
        trace = _head(path, events)
        for event in events:
            _take(trace, event)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the trace {str(path)!r} cannot be read: {reason}") from error
    trace.steps.sort(key=lambda step: step.ops)
    return trace


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        while True:
            try:
                line = next(lines, None)
            except EOFError:  # a compressed file of a process that died
                return
            if line is None:
                return
            text = line.strip().rstrip(",")
            if text in ("[", "]", "", "{}]"):
                continue
            try:
                event = json.loads(text)
            except ValueError:
                return  # the writer did not get further
            if isinstance(event, dict):
                yield event


def _head(path: Path, events: Iterator[dict[str, Any]]) -> Trace:
    for event in events:
        if event.get("name") == "pagedinfer":
            about = event["args"]
            if about["format"] > FORMAT:
                raise ValueError(
                    f"{str(path)!r} is a trace of format {about['format']}; this version reads up to {FORMAT}"
                )
            return Trace(about["config"], about["engine"])
    raise ValueError(f"{str(path)!r} is no trace of pagedinfer")


def _take(trace: Trace, event: dict[str, Any]) -> None:
    name, args, seconds = event.get("name"), event.get("args"), event.get("ts", 0) / 1e6
    if not args:
        return
    if name == "step":
        trace.steps.append(_step(args, seconds))
    elif event["ph"] == "b" and name == "waiting" and "prompt" in args:
        trace.added.append(_added(event["id"], args, seconds))
    elif event["ph"] == "e" and "reason" in args:
        ended = Ended(
            op=args["op"],
            time=seconds,
            request_id=event["id"],
            reason=args["reason"],
            outside=args.get("outside", False),
            num_output_tokens=args["output"],
            content=args["content"],
        )
        trace.ended.setdefault(ended.request_id, []).append(ended)
    elif name == "refused":
        trace.refused.append((seconds, args["request"], args["message"]))
    elif name in ("reset_prefix_cache", "abort_all", "recover"):
        trace.calls.append((args["op"], name))


def _added(request_id: str, args: dict[str, Any], seconds: float) -> Added:
    return Added(
        op=args["op"],
        time=seconds,
        request_id=request_id,
        num_prompt_tokens=args["prompt"],
        num_given_tokens=args.get("given", 0),
        max_tokens=args["max"],
        min_tokens=args.get("min", 0),
        by_length_only=args.get("exact", False),
        priority=args.get("priority", 0),
        skip_reading_prefix_cache=args.get("skip", False),
        parent=args.get("parent"),
        content=args["content"],
    )


def _step(args: dict[str, Any], seconds: float) -> StepRecord:
    first, last = args["ops"]
    out, back = args.get("swaps", (0, 0))
    return StepRecord(
        number=args["n"],
        ops=(first, last),
        time=seconds,
        seconds=args.get("s", 0.0),
        checksum=args["crc"],
        num_tokens=args["tokens"],
        num_requests=args["requests"],
        num_running=args["running"],
        num_waiting=args["waiting"],
        num_free=args["free"],
        chunks=[tuple(chunk) for chunk in args.get("chunks", ())],
        admitted=args.get("admitted", []),
        swapping_in=args.get("loading", []),
        idle=args.get("idle", []),
        preempted=args.get("preempted", []),
        refusal=args.get("refusal"),
        swaps=(out, back),
        rates=tuple(args["rates"]) if "rates" in args else None,
        swaps_in_done=args.get("in_done"),
    )
