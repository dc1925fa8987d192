"""What the API process and the engine process say to each other, as MessagePack. Torch-free.

Every message is one of the types of `ToEngine` or `FromEngine` and is checked when it is decoded; nothing
in it can name code. Requests go by a number that the API process gives them, and choice i of a request by
that number plus i.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Self

import msgspec

from pagedinfer.sampling_params import RequestOutputKind, SamplingParams

# ---- to the engine ---------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    """A request to work on."""

    number: int
    prompt_token_ids: list[int]
    params: dict[str, Any]  # see `params_to_wire`
    priority: int
    cache_salt: str


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """Requests that nobody waits for any more."""

    numbers: list[int]


class StopChoice(msgspec.Struct, tag="stop", array_like=True):
    """One choice of a request whose text has come to a stop string."""

    number: int
    index: int


class ResetPrefixCache(msgspec.Struct, tag="reset", array_like=True):
    """Forget the KV of earlier prompts."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Give everything back and exit."""


ToEngine = AddRequest | AbortRequests | StopChoice | ResetPrefixCache | Shutdown

# ---- from the engine -------------------------------------------------------------------------------


class EngineLimits(msgspec.Struct):
    """What the engine settled on when it started."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_cpu_blocks: int
    enable_prefix_caching: bool
    max_logprobs: int
    device: str
    dtype: str
    default_sampling_params: dict[str, Any]
    eos_token_ids: list[int]
    settings: dict[str, Any] = {}
    """Other parameters of the engine that advice looks at."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine has started."""

    limits: EngineLimits


class StartFailed(msgspec.Struct, tag="start_failed", array_like=True):
    """It could not."""

    message: str


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """A token at a position, with its rank from 1."""

    token_id: int
    logprob: float
    rank: int


class ChoiceDelta(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """What is new of one choice."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[list[TokenLogprob]] | None = None  # for each new token: the drawn one, then the best ones


class RequestTimes(msgspec.Struct, array_like=True, gc=False):
    """When things happened, on the monotonic clock, which is the same in all processes of a machine."""

    queued: float
    scheduled: float
    first_token: float
    last_token: float


class RequestDelta(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """What is new of one request."""

    number: int
    choices: list[ChoiceDelta]
    num_cached_tokens: int = 0
    finished: bool = False
    error: str | None = None
    times: RequestTimes | None = None  # with the last one
    num_preemptions: int = 0
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None  # by position: the token there, the best


class TokenColumns(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """One token each of choices of which there is nothing else to tell, packed: most of what a step gives."""

    choices: bytes = b""  # int64 each, as this machine has them: their numbers
    token_ids: bytes = b""  # int32 each

    @classmethod
    def pack(cls, choices: list[int], token_ids: list[int]) -> Self:
        """Of two lists of the same length."""
        return cls(array("q", choices).tobytes(), array("i", token_ids).tobytes())

    def unpack(self) -> Iterator[tuple[int, int]]:
        """(choice, token) after (choice, token)."""
        return zip(array("q", self.choices), array("i", self.token_ids), strict=True)


class EngineStats(msgspec.Struct, array_like=True):
    """How the engine stands; sums are since its start."""

    num_running: int
    num_waiting: int
    num_swapped: int
    waiting_reason: str | None
    kv_cache_usage: float
    cpu_cache_usage: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions_swap: int
    num_preemptions_recompute: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_steps: int
    num_scheduled_tokens: int
    num_blocks_swapped_in: int
    num_blocks_swapped_out: int
    step_seconds: float  # spent in steps
    limited_steps: dict[str, int]  # steps after which a request waited, by what it waited for


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """What a step gave."""

    requests: list[RequestDelta]
    tokens: TokenColumns  # of choices that are not in `requests`
    num_step_tokens: int  # that the step computed
    stats: EngineStats | None = None  # now and then


class RequestsFailed(msgspec.Struct, tag="failed", array_like=True):
    """Requests that have ended with an error."""

    numbers: list[int]
    kind: str  # "too_large", "invalid" or "internal"
    message: str


FromEngine = Ready | StartFailed | Outputs | RequestsFailed


# ---- sampling parameters ---------------------------------------------------------------------------

_DEFAULTS = SamplingParams()
_LARGEST = 2**63 - 1  # of MessagePack's integers that everybody reads; no length comes near
_LEFT_OUT = {"logits_processors", "output_kind"}


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults.

    Raises:
        ValueError: there are `logits_processors`, which are code, and code stays in its process.
    """
    if params.logits_processors:
        raise ValueError("logits_processors are functions and cannot be sent to the engine's process")
    wire = {}
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        if field.name not in _LEFT_OUT and value != getattr(_DEFAULTS, field.name):
            wire[field.name] = min(value, _LARGEST) if isinstance(value, int) else value
    if params.structured_outputs is not None:
        wire["structured_outputs"] = params.structured_outputs.to_dict()
    return wire


def params_from_wire(wire: dict[str, Any]) -> SamplingParams:
    """The parameters again, checked again; the engine gives what is new of them."""
    return SamplingParams(**wire, output_kind=RequestOutputKind.DELTA)
