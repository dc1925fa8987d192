"""What a request gives back. Field names are vLLM's. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """One token at one position, under the model's distribution."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds, and how often."""

    arrival_time: float = 0.0
    """Wall clock (time.time()), for people; all other times are of the monotonic clock."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """First scheduled."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    first_token_latency: float = 0.0
    """From the arrival to the first token."""
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KV was found in the prefix cache."""

    def note_tokens_at(self, now: float) -> None:
        """Tokens came, at this time of the monotonic clock."""
        if not self.first_token_ts:
            self.first_token_ts = now
            self.first_token_latency = now - self.queued_ts
        self.last_token_ts = now


@dataclass(slots=True)
class CompletionOutput:
    """One of the n choices of a request."""

    index: int
    text: str
    """What was generated so far, or since the last output; see SamplingParams.output_kind."""
    token_ids: list[int]
    """Likewise. A token that stopped the generation is the last one."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the generated tokens; None unless SamplingParams.logprobs asks."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, by id: the best ones, and the drawn one."""
    finish_reason: FinishReason | None = None
    """None while it runs. "stop": EOS, a stop token or string; "length": max_tokens or the context's end."""
    stop_reason: int | str | None = None
    """The stop string or the stop token's id; None if it was EOS, or no stop."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What one request has given so far, or since its last output."""

    request_id: str
    prompt: str | None
    """None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt; None for the first, which nothing precedes."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KV was found in the prefix cache."""
    error: str | None = None
    """Why the request could not be run; its outputs then have the finish_reason "error"."""
