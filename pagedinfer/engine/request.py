"""A request on its way through the engine: its tokens, how far they are computed, what it holds."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedinfer.engine.batch import AdmittedRequest

if TYPE_CHECKING:
    from pagedinfer.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()  # new, or preempted and to be recomputed
    RUNNING = enum.auto()  # holds a slot
    SWAPPED = enum.auto()  # preempted, its KV in CPU blocks
    SWAPPING_IN = enum.auto()  # holds a slot; runs once its KV has arrived from CPU blocks
    FINISHED_STOPPED = enum.auto()  # EOS, a stop token or a stop string
    FINISHED_LENGTH = enum.auto()  # max_tokens or max_model_len
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()  # its token could not be sampled

    @property
    def is_finished(self) -> bool:
        return self in _FINISH_REASONS

    @property
    def finish_reason(self) -> str | None:
        """As in CompletionOutput.finish_reason: "stop", "length", "abort", "error"; None while unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One choice of one prompt. The scheduler owns everything here but what the caller passed in.

    Args:
        request_id: unique among the unfinished requests.
        prompt_token_ids: at least one token.
        sampling_params: read here are `max_tokens` (None: up to the longest context), `min_tokens`,
            `ignore_eos`, `stop_token_ids` and whether there is a `stop`; the runner reads the rest.
        eos_token_ids: what ends the text, unless `sampling_params.ignore_eos`.
        seed: 64 bits, the key of the request's random stream.
        priority: lower is more urgent; looked at under `scheduling_policy="priority"` only.
        arrival_time: seconds since the epoch; now, if not given.
        cache_salt: blocks are shared only with requests of the same salt.
        skip_reading_prefix_cache: compute every token of the prompt, even if the cache has it (for the
            log-probabilities of the prompt).
        output_token_ids: tokens that count as generated already (a fork of a running request).
        bad_word_ids: `sampling_params.bad_words`, each as tokens.
        num_logprobs: how many of the best tokens each step reports beside the drawn one and its rank;
            None: neither.
        needs_known_tokens: no step may begin before the host knows all tokens drawn so far: something on the
            host looks at this request's to say what may be drawn, or whether it goes on at all.
        reports_at_end: nobody looks at its tokens before it ends, or ever at their log-probabilities. Steps
            report its first token, and with its end all others.
        stream: the number that its tokens between the first and the last go by in `StreamedTokens`, for
            callers who take them from there.
    """

    __slots__ = (
        "arrival_time",
        "bad_word_ids",
        "block_ids",
        "cache_salt",
        "capacity",
        "cpu_block_ids",
        "ends_by_length_only",
        "eos_token_ids",
        "finished",
        "fork_parent",
        "is_new",
        "max_total_tokens",
        "min_total_tokens",
        "needs_known_tokens",
        "next_cacheable",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_logprobs",
        "num_preemptions",
        "num_prompt_tokens",
        "num_shared_blocks",
        "num_tokens",
        "num_told",
        "priority",
        "quiet_until",
        "reports_at_end",
        "request_id",
        "sampling_params",
        "seed",
        "skip_reading_prefix_cache",
        "slot",
        "status",
        "stop_reason",
        "stop_set",
        "stream",
        "swap_in_step",
        "token_ids",
        "urgency",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        skip_reading_prefix_cache: bool = False,
        output_token_ids: Sequence[int] = (),
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        num_logprobs: int | None = None,
        needs_known_tokens: bool = False,
        reports_at_end: bool = False,
        stream: int | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id!r}: the prompt is empty; it needs at least one token")
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.priority = priority
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.cache_salt = cache_salt
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.bad_word_ids = bad_word_ids
        self.num_logprobs = num_logprobs
        self.needs_known_tokens = needs_known_tokens
        self.reports_at_end = reports_at_end
        self.stream = stream

        # Tokens: the prompt and what was generated and is known to the host. Those that a step in
        # flight draws count in num_tokens from the moment that the step is scheduled.
        self.token_ids: list[int] = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.num_told = self.num_tokens  # if it `reports_at_end`: all but those that no update has told of
        self.num_computed_tokens = 0  # how many have their KV written (by a step scheduled so far)

        # When to stop. A stop token counts from position min_total_tokens on.
        stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        self.stop_set = stop_token_ids if sampling_params.ignore_eos else stop_token_ids | eos_token_ids
        self.ends_by_length_only = not self.stop_set and not sampling_params.stop
        self.min_total_tokens = self.num_prompt_tokens + sampling_params.min_tokens
        self.max_total_tokens = 0  # set when it is added: prompt + max_tokens, at most max_model_len
        self.status = RequestStatus.WAITING
        self.finished = False
        self.stop_reason: int | str | None = None

        # What it holds.
        self.slot = -1
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that these blocks have room for
        self.cpu_block_ids: list[int] = []  # while it is swapped out, and until its KV has arrived
        self.swap_in_step = 0  # the step that began its last swap in
        self.num_shared_blocks = 0  # of block_ids, those that it found rather than allocated
        self.fork_parent: Request | None = None  # whose KV it waits for
        self.next_cacheable = 0  # once so many tokens are computed, another full block can be cached
        self.quiet_until = 0  # with fewer tokens, a new one changes nothing unless it is a stop token

        self.urgency: tuple[int, int, int] = (0, 0, 0)  # the smaller, the more urgent; set when it is added
        self.is_new = True  # it has never been admitted
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when first admitted
        self.num_preemptions = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated and is known; a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_unknown_tokens(self) -> bool:
        """Whether a step in flight has yet to say which token it drew."""
        return self.num_tokens > len(self.token_ids)

    def lose_kv(self) -> None:
        """Leaves nothing but its known tokens: it holds no slot and no blocks, and waits."""
        self.num_preemptions += self.slot >= 0
        self.slot = -1
        self.block_ids, self.cpu_block_ids = [], []
        self.capacity = self.num_shared_blocks = self.num_computed_tokens = 0
        self.num_tokens = len(self.token_ids)
        self.status = RequestStatus.WAITING

    def admitted(self, slot: int) -> AdmittedRequest:
        """What the runner is told of it when it takes a slot."""
        return AdmittedRequest(
            request_id=self.request_id,
            slot=slot,
            token_ids=self.token_ids.copy(),
            num_prompt_tokens=self.num_prompt_tokens,
            block_ids=self.block_ids.copy(),
            sampling_params=self.sampling_params,
            seed=self.seed,
            stop_token_ids=self.stop_set,
            bad_word_ids=self.bad_word_ids,
            num_logprobs=self.num_logprobs,
        )

    def take_unreported(self) -> tuple[list[int], list[float]]:
        """The tokens that no update has told of, and zeros for their log-probabilities."""
        if not self.reports_at_end:
            return [], []
        tokens = self.token_ids[self.num_told :]
        self.num_told = len(self.token_ids)
        return tokens, [0.0] * len(tokens)

    def check_stop(self) -> RequestStatus | None:
        """How the newest token ends the request, None if it does not; sets `stop_reason`."""
        num_tokens = len(self.token_ids)
        token = self.token_ids[-1]
        if token in self.stop_set and num_tokens > self.min_total_tokens:
            is_eos = token in self.eos_token_ids and not self.sampling_params.ignore_eos
            self.stop_reason = None if is_eos else token
            return RequestStatus.FINISHED_STOPPED
        if num_tokens >= self.max_total_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, slot={self.slot}, blocks={len(self.block_ids)})"
        )
