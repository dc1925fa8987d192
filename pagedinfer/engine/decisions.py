"""Why the scheduler did what it did in a step: who had to give way, and what the first in the queue lacks."""

from __future__ import annotations

from typing import Literal, NamedTuple

WaitingReason = Literal["slots", "blocks", "tokens"]


RefusalCause = Literal["", "prefix", "urgent", "unknown token"]
"""A running prompt computes what it begins with; a more urgent one has the step; its token is being drawn."""


class Preempted(NamedTuple):
    """A request that had to give up its blocks or its slot."""

    request_id: str
    by: str  # the request that needs them
    lack: WaitingReason  # of what there was too little: blocks, or slots for a more urgent request
    kind: Literal["swap", "recompute"]
    num_tokens: int  # whose KV it had
    num_blocks: int


class Refusal(NamedTuple):
    """Why the first waiting request was not admitted."""

    request_id: str
    reason: WaitingReason
    num_needed: int = 0  # blocks, for its next tokens
    num_free: int = 0  # blocks
    peak: int = 0  # blocks that were expected to be in use at most, had it been admitted; 0: not the reason
    cause: RefusalCause = ""  # why it waits though there is enough
