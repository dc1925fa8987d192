"""Which running requests begin with the same KV blocks: what attention can read once for all of them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from pagedinfer.engine.batch import ScheduledRequest, SharedPrefix
from pagedinfer.engine.request import Request
from pagedinfer.engine.running_requests import RunningRequests

_GRANULE = 64  # tokens: what is read once ends at a multiple of it, as the attention op wants it

# Reading a prefix apart takes a launch more in each layer, and the folding of what it gives: about the time
# in which an H200 reads the KV of 32,768 tokens of a layer with 8 heads of 128 in bfloat16 that its cache
# holds (0.5 ns each). The prefix itself takes as long as reading it for 8 requests, whoever they are, since
# the products of few rows leave most of a tile empty.
_LEAST_SAVED = 32768
_READS_LOST = 8


class _Arrangement(NamedTuple):
    """How the requests of a step are to stand."""

    order: list[int] | None  # their indices; None: they stand so already
    prefixes: list[SharedPrefix]


class SharedPrefixes:
    """Groups of requests with a common first block, and puts those of a group side by side in a step.

    Blocks that several requests hold are full, and nobody writes to them. Groups are looked for anew only
    when somebody has come or gone, and so is the order of a step in which all who run take part.
    """

    def __init__(self, running: RunningRequests, block_size: int) -> None:
        self._running = running
        self._block_size = block_size
        self._version = -1
        self._group_of: dict[int, int] = {}  # by slot
        self._num_tokens: list[int] = []  # by group
        self._of_all: _Arrangement | None = None  # of all who run

    def arrange(self, scheduled: list[ScheduledRequest], sampling: list[Request]) -> list[SharedPrefix]:
        """Moves requests that share a prefix to the front of a step of decodes, group after group.

        Args:
            scheduled, sampling: the step's, one each; changed in place.

        Returns:
            The groups, in their order.
        """
        if self._version != self._running.version:
            self._version = self._running.version
            self._search()
            self._of_all = None
        if not self._num_tokens:
            return []
        if len(scheduled) < len(self._running):
            arrangement = self._arrangement(scheduled)
        else:  # as in the last step: in the order of their urgency
            arrangement = self._of_all = self._of_all or self._arrangement(scheduled)
        if arrangement.order is not None:
            scheduled[:] = [scheduled[i] for i in arrangement.order]
            sampling[:] = [sampling[i] for i in arrangement.order]
        return arrangement.prefixes

    def _arrangement(self, scheduled: list[ScheduledRequest]) -> _Arrangement:
        none = len(self._num_tokens)
        groups = [self._group_of.get(request.slot, none) for request in scheduled]
        order = sorted(range(len(groups)), key=groups.__getitem__)
        counts = Counter(groups)
        return _Arrangement(
            order if any(i > j for i, j in pairwise(order)) else None,
            [SharedPrefix(counts[group], length) for group, length in enumerate(self._num_tokens)],
        )

    def _search(self) -> None:
        by_first_block: dict[int, list[Request]] = {}
        for request in self._running:
            by_first_block.setdefault(request.block_ids[0], []).append(request)
        found = []
        for members in by_first_block.values():
            if len(members) > 1:
                num_tokens = self._num_common(members)
                if (len(members) - 1 - _READS_LOST) * num_tokens >= _LEAST_SAVED:
                    found.append((members, num_tokens))
        found.sort(key=lambda group: (len(group[0]) - 1) * group[1], reverse=True)
        del found[SharedPrefix.MAX_GROUPS :]
        self._num_tokens = [num_tokens for _, num_tokens in found]
        self._group_of = {
            request.slot: group for group, (members, _) in enumerate(found) for request in members
        }

    def _num_common(self, members: list[Request]) -> int:
        """The tokens that can be read once for all of them."""
        # Of sorted lists, what the first and the last have in common at their beginnings all have.
        first = min(request.block_ids for request in members)
        last = max(request.block_ids for request in members)
        num_blocks = min(len(first), len(last))
        for i in range(num_blocks):
            if first[i] != last[i]:
                num_blocks = i
                break
        # The token that a step computes is never among them.
        computed = min(request.num_computed_tokens for request in members)
        return min(num_blocks * self._block_size, computed - 1) // _GRANULE * _GRANULE
