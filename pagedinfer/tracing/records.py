"""What a trace holds, and how a line of its file says it.

The file is in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open: one event a
line, times in microseconds from the start. It need not end properly, so that a trace of a process that died
can be read; a name that ends in .gz makes it compressed. The tracks show the steps, when each request waited
and ran, and counters. What replay and explain need stands in the events' `args`:

- `pagedinfer` (metadata, the first line): the scheduler's configuration and the engine's.
- `waiting` (the begin of a request): an `Added`.
- `step`: a `StepRecord`.
- the end of a request's last slice: an `Ended`.
- `refused`: a request that could never fit, with the message.
- `reset_prefix_cache`, `abort_all`, `recover`: calls of that name.

Every call of the scheduler that matters has a number, `op`, in the order of the calls: a step has one for
its scheduling and one for its update, between which others may lie. No token is written: blocks of the
prompts and outputs have ids (see `ContentIds`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagedinfer.tracing.content_ids import Ranges

FORMAT = 1
"""Raised when a file could no longer be read by older code."""


@dataclass(frozen=True, slots=True)
class Added:
    """A request came."""

    op: int
    time: float  # seconds
    request_id: str
    num_prompt_tokens: int
    num_given_tokens: int  # output that it came with: a beam
    max_tokens: int | None
    min_tokens: int
    by_length_only: bool  # nothing but its length can end it
    priority: int
    skip_reading_prefix_cache: bool
    parent: str | None  # the request that it is a fork of
    content: Ranges


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ended."""

    op: int  # of the update that ended it, or of the call that did
    time: float
    request_id: str
    reason: str  # "stop", "length", "abort", "error"
    outside: bool  # by a call: abort, or a stop string
    num_output_tokens: int
    content: Ranges  # prompt and output


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step."""

    number: int
    ops: tuple[int, int]  # of its scheduling and its update; equal for one with nothing to run
    time: float  # seconds at which it was scheduled
    seconds: float  # from the result before it, or from its start if nobody was there, to its own
    checksum: int  # of which slot computed which tokens
    num_tokens: int
    num_requests: int
    num_running: int
    num_waiting: int
    num_free: int  # blocks
    chunks: list[tuple[str, int, int]]  # (request, first token, tokens) of those with more than one token
    admitted: list[str]
    swapping_in: list[str]  # took a slot, and wait for their KV
    idle: list[str]  # have a slot and computed nothing
    preempted: list[list[Any]]  # see `Preempted`
    refusal: list[Any] | None  # see `Refusal`
    swaps: tuple[int, int]  # blocks out and in
    rates: tuple[float, float] | None  # bytes/s of swaps, tokens/s of prefill, where they have changed
    swaps_in_done: int | None  # see `StepOutput`


@dataclass(slots=True)
class Trace:
    """All of a file."""

    config: dict[str, Any]  # of the scheduler
    engine: dict[str, Any]  # model, device and the like
    added: list[Added] = field(default_factory=list)
    ended: dict[str, list[Ended]] = field(default_factory=dict)  # ids may be used again
    steps: list[StepRecord] = field(default_factory=list)
    calls: list[tuple[int, str]] = field(default_factory=list)  # (op, name) of the other calls
    refused: list[tuple[float, str, str]] = field(default_factory=list)  # (time, request, message)
