"""What crosses the boundary between scheduler and runner: one step's work, and what it gave.

No torch here: the scheduler, the fake runners of the tests and every executor speak these types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from pagedinfer.sampling_params import SamplingParams  # at run time, too: what decodes a Batch needs it

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class AdmittedRequest:
    """A request that takes a slot in this step (new, forked, or resumed after preemption), whole."""

    request_id: str
    slot: int  # in [0, max_num_seqs); its own until the request leaves the running state
    token_ids: list[int]  # prompt and what was generated so far
    num_prompt_tokens: int
    block_ids: list[int]  # its block table so far, this step's blocks included
    sampling_params: SamplingParams
    seed: int  # 64 bits, the key of its random stream
    num_logprobs: int | None = None  # best tokens to report with each drawn one; None: not even its rank
    stop_token_ids: frozenset[int] = frozenset()  # what must not be drawn before min_tokens are there
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that must not be completed


# One for each request of each step: made in half the time of a dataclass, and no collector looks at it.
class ScheduledRequest(msgspec.Struct, gc=False):
    """The tokens of one running request that a step computes."""

    request_id: str
    slot: int
    start: int  # position of the first token to compute: how many are in the cache already
    num_tokens: int  # how many to compute; 1 for a decode, a chunk for a prefill
    sample: bool  # draw the next token from the logits of the last one
    # To append to its block table; empty for one admitted in this step. An empty list may be another's, too.
    new_block_ids: list[int]


@dataclass(slots=True)
class SharedPrefix:
    """Neighbours in a batch whose first tokens lie in the same KV blocks, to be read once for all of them."""

    MAX_GROUPS: ClassVar[int] = 32  # of a batch

    num_requests: int
    num_tokens: int  # a multiple of 64


@dataclass(slots=True)
class Batch:
    """One step, in the order in which the runner carries it out: swaps out, swaps in, copies, forward.

    Swaps may go on beside this step and later ones. The runner sees to it that a block is not given to a
    request, nor read or written by another move, before what is under way with it has ended.
    """

    step: int
    released_slots: list[int] = field(default_factory=list)  # free before `admitted` is applied
    admitted: list[AdmittedRequest] = field(default_factory=list)
    requests: list[ScheduledRequest] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (block, CPU block)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (CPU block, block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (block, block), copy on write
    # Of the requests from the first on, one group after another; in steps of decodes alone.
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum([request.num_tokens for request in self.requests])

    def is_empty(self) -> bool:
        """Whether there is nothing to run, not even a copy."""
        return not (self.requests or self.swaps_out or self.swaps_in or self.copies)


@dataclass(slots=True)
class BestTokens:
    """The k best tokens at some positions, or of some rows, and the rank of the one that is there.

    Ranks count from 1, in the order of falling log-probability, ties by rising id. They are unique.
    """

    logprobs: npt.NDArray[np.float32]  # [n], of the tokens that are there
    ranks: npt.NDArray[np.int64]  # [n], theirs
    top_ids: npt.NDArray[np.int64]  # [n, k]; -1 where fewer can be drawn
    top_logprobs: npt.NDArray[np.float32]  # [n, k]


@dataclass(slots=True)
class StepOutput:
    """What a step drew, one entry for each request of the batch with `sample` set, in their order."""

    token_ids: npt.NDArray[np.int64]  # -1: the row could not be sampled (NaN or nothing left to draw)
    logprobs: npt.NDArray[np.float32]  # of the drawn tokens; 0 for a request without `num_logprobs`
    best: BestTokens | None = None
    """Of all rows, as many tokens as one asks for at least; None unless a request has `num_logprobs`."""
    # The last step whose swaps in, and all before, had ended by now; None: this step, whatever runs at once.
    swaps_in_done: int | None = None
    prompts: dict[str, tuple[int, BestTokens]] = field(default_factory=dict)
    """By request: the position of the first token of its prompt that was rated, and the tokens from it."""


class StepHandle(Protocol):
    """A step under way. The device may still be at work; `result` waits for it."""

    @property
    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> StepOutput: ...
