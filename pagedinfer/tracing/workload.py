"""The requests of a trace, made again: with other tokens that are equal where the traced ones were."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from pagedinfer.engine.request import Request
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.tracing.content_ids import expand
from pagedinfer.tracing.records import Added, Ended, Trace

EOS = 0
"""Stands for the stop tokens of a request that none has ended: nobody draws it."""

Place = tuple[int, int]
"""(what holds it: a block, or a request's number for all behind its full blocks; position in the sequence)"""


class _Tokens:
    """Which token stands where: the same in places that were found to be equal, and another one elsewhere.

    A place has the number of its holder, and equal ones that of one among them. So full blocks are equal if
    and only if the traced ones were, and so are a fork and its parent up to where it left.
    """

    def __init__(self) -> None:
        self._equal_to: dict[Place, Place] = {}
        self._own: dict[Place, int] = {}  # of places whose token stands nowhere else in a sequence
        self._special: set[int] = set()  # holders with places in the above

    def make_equal(self, a: Place, b: Place) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._equal_to[a] = b
            self._special.update((a[0], b[0]))

    def make_own(self, place: Place, token: int) -> int:
        """Gives a place, and all that are equal, this token unless it has one of its own; returns that."""
        place = self._find(place)
        self._special.add(place[0])
        return self._own.setdefault(place, token)

    def at(self, place: Place) -> int:
        place = self._find(place)
        return self._own.get(place, place[0])

    def run(self, holder: int, start: int, count: int) -> list[int]:
        """Tokens in consecutive places."""
        if holder not in self._special:
            return [holder] * count
        return [self.at((holder, position)) for position in range(start, start + count)]

    def _find(self, place: Place) -> Place:
        above = self._equal_to.get(place)
        while above is not None:
            higher = self._equal_to.get(above)
            if higher is not None:
                self._equal_to[place] = higher
            place, above = above, higher
        return place


@dataclass(slots=True)
class TracedRequest:
    """A request, when it came, and what became of it."""

    added: Added
    ended: Ended | None  # None: it had not ended when the trace did
    blocks: list[int]  # the ids of its full blocks
    block_size: int
    number: int  # holds what is behind them
    known: _Tokens  # of all requests
    tokens: list[int] = field(default_factory=list)  # prompt and output
    stop_token: int = EOS

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
            eos_token_ids=frozenset([self.stop_token]),
            priority=added.priority,
            skip_reading_prefix_cache=added.skip_reading_prefix_cache,
            output_token_ids=self.tokens[added.num_prompt_tokens : num_tokens],
        )

    def token(self, position: int) -> int:
        """What is drawn for a position; -1 where it could not be."""
        if position < len(self.tokens):
            return self.tokens[position]
        if self.ended is not None and self.ended.reason == "error":
            return -1
        return self.known.at(self.place(position))

    def place(self, position: int) -> Place:
        """Where a token of it stands."""
        index = position // self.block_size
        return self.blocks[index] if index < len(self.blocks) else self.number, position

    def fill(self) -> None:
        """Gives it its tokens, when all is known that is equal."""
        size = self.block_size
        for index, block in enumerate(self.blocks):
            self.tokens += self.known.run(block, index * size, size)
        start = len(self.tokens)
        self.tokens += self.known.run(self.number, start, self.num_tokens - start)


def requests_of(trace: Trace) -> dict[int, TracedRequest]:
    """The requests of a trace by the `op` that added them."""
    arrivals = sorted(trace.added, key=lambda added: added.op)
    contents = [added.content for added in arrivals]
    contents += [ended.content for ends in trace.ended.values() for ended in ends]
    next_number = 1 + max((sum(ranges[-1]) for ranges in contents if ranges), default=0)
    ops_of_ends = {name: [ended.op for ended in ends] for name, ends in trace.ended.items()}
    latest: dict[str, TracedRequest] = {}
    found: dict[int, TracedRequest] = {}
    tokens = _Tokens()
    for added in arrivals:
        # The first end after it came is its own, even if its name was used before.
        ends = trace.ended.get(added.request_id, [])
        index = bisect_right(ops_of_ends.get(added.request_id, []), added.op)
        ended = ends[index] if index < len(ends) else None
        blocks = expand(added.content if ended is None else ended.content)
        request = TracedRequest(added, ended, blocks, trace.config["block_size"], next_number, tokens)
        next_number += 1
        parent = latest.get(added.parent or "")
        if parent is not None:
            _share(request, parent, tokens)
        latest[added.request_id] = request
        found[added.op] = request
    for request in found.values():
        if request.ended is not None and request.ended.reason == "stop" and not request.ended.outside:
            request.stop_token = tokens.make_own(request.place(request.num_tokens - 1), next_number)
            next_number += 1
    for request in found.values():
        request.fill()
    return found


def _share(child: TracedRequest, parent: TracedRequest, tokens: _Tokens) -> None:
    """A fork begins as its parent does, also where a block is not full or belongs to others as well."""
    num_shared = child.added.num_prompt_tokens + child.added.num_given_tokens - 1  # its last may be its own
    for start in range(0, num_shared, child.block_size):
        if child.place(start) != parent.place(start):
            for position in range(start, min(start + child.block_size, num_shared)):
                tokens.make_equal(child.place(position), parent.place(position))
