"""The requests of a trace, made again: with other tokens that are equal where the traced ones were."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pagedinfer.engine.request import Request
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.tracing.content_ids import expand
from pagedinfer.tracing.records import Added, Ended, Trace

EOS = 0
"""Ends the requests that a stop token ended; no other token is equal to it."""

_TAILS = 1 << 30  # tokens from here on fill what is behind the last full block


@dataclass(slots=True)
class TracedRequest:
    """A request, when it came, and what became of it."""

    added: Added
    ended: Ended | None  # None: it had not ended when the trace did
    tokens: list[int]  # prompt and output

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        output = self.added.num_given_tokens if self.ended is None else self.ended.num_output_tokens
        return self.added.num_prompt_tokens + output

    def make(self) -> Request:
        """The request as it was added."""
        added = self.added
        num_tokens = added.num_prompt_tokens + added.num_given_tokens
        params = SamplingParams(
            max_tokens=added.max_tokens,
            min_tokens=added.min_tokens,
            ignore_eos=added.by_length_only,
            detokenize=False,
        )
        return Request(
            added.request_id,
            self.tokens[: added.num_prompt_tokens],
            params,
            eos_token_ids=frozenset([EOS]),
            priority=added.priority,
            skip_reading_prefix_cache=added.skip_reading_prefix_cache,
            output_token_ids=self.tokens[added.num_prompt_tokens : num_tokens],
        )

    def token(self, position: int) -> int:
        """What is drawn for a position; -1 where it could not be."""
        ended = self.ended
        if ended is not None and position == self.num_tokens - 1 and ended.reason == "stop":
            return self.tokens[position] if ended.outside else EOS
        if ended is not None and position >= self.num_tokens and ended.reason == "error":
            return -1
        return self.tokens[position] if position < len(self.tokens) else _TAILS + position


def requests_of(trace: Trace) -> dict[int, TracedRequest]:
    """The requests of a trace by the `op` that added them."""
    block_size = trace.config["block_size"]
    tokens_of_block: dict[int, list[int]] = {}
    ops_of_ends = {name: [ended.op for ended in ends] for name, ends in trace.ended.items()}
    latest: dict[str, TracedRequest] = {}
    found = {}
    for number, added in enumerate(sorted(trace.added, key=lambda added: added.op)):
        # The first end after it came is its own, even if its name was used before.
        ends = trace.ended.get(added.request_id, [])
        index = bisect_right(ops_of_ends.get(added.request_id, []), added.op)
        ended = ends[index] if index < len(ends) else None
        request = TracedRequest(added, ended, [])
        num_shared = 0
        if added.parent is not None and added.parent in latest:
            num_shared = added.num_prompt_tokens + added.num_given_tokens
            num_shared -= added.num_given_tokens > 0  # a beam has a last token of its own
        shared = latest[added.parent].tokens[:num_shared] if num_shared and added.parent else []
        _fill(request, shared, tokens_of_block, block_size, number)
        latest[added.request_id] = request
        found[added.op] = request
    return found


def _fill(
    request: TracedRequest,
    shared: list[int],
    tokens_of_block: dict[int, list[int]],
    block_size: int,
    number: int,
) -> None:
    """Gives a request its tokens: those `shared` with a parent, those of known blocks, and new ones."""
    content = request.added.content if request.ended is None else request.ended.content
    tokens = request.tokens
    for block in expand(content):
        known = tokens_of_block.get(block)
        if known is None:
            start = len(tokens)
            known = shared[start : start + block_size]
            known += [block] * (block_size - len(known))
            tokens_of_block[block] = known
        tokens += known
    tokens += shared[len(tokens) :]
    tokens += range(_TAILS + 4096 * number, _TAILS + 4096 * number + request.num_tokens - len(tokens))
