"""The requests that hold a slot, the most urgent first."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter

from pagedinfer.engine.request import Request

_by_urgency = attrgetter("urgency")


class RunningRequests:
    """Requests sorted by urgency, and who has which slot."""

    def __init__(self, max_num_seqs: int) -> None:
        self.by_urgency: list[Request] = []
        self.version = 0  # grows when somebody comes or goes
        self.num_limit_tokens = 0  # the sum of the tokens that they may reach
        self.num_needing_tokens = 0  # of them, those with needs_known_tokens
        self._free_slots = list(range(max_num_seqs))  # a heap: low slots first
        self._released_slots: list[int] = []  # since the runner was told last

    def __len__(self) -> int:
        return len(self.by_urgency)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.by_urgency)

    @property
    def least_urgent(self) -> Request:
        return self.by_urgency[-1]

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def num_at_least_as_urgent(self, priority: int) -> int:
        """How many, from the front on, a request of this priority may not displace."""
        return bisect_right(self.by_urgency, priority, key=_priority)

    def add(self, request: Request) -> None:
        self.version += 1
        request.slot = heapq.heappop(self._free_slots)
        self.num_limit_tokens += request.max_total_tokens
        self.num_needing_tokens += request.needs_known_tokens
        insort(self.by_urgency, request, key=_by_urgency)

    def remove(self, request: Request) -> None:
        self.version += 1
        del self.by_urgency[bisect_left(self.by_urgency, request.urgency, key=_by_urgency)]
        self.num_limit_tokens -= request.max_total_tokens
        self.num_needing_tokens -= request.needs_known_tokens
        heapq.heappush(self._free_slots, request.slot)
        self._released_slots.append(request.slot)
        request.slot = -1

    def release_all_slots(self) -> None:
        """Makes the runner forget whatever it holds; call when nothing runs."""
        self._released_slots = sorted(self._free_slots)

    def take_released_slots(self) -> list[int]:
        """Slots that were given up since the last call, for the runner."""
        released, self._released_slots = self._released_slots, []
        return released


def _priority(request: Request) -> int:
    return request.urgency[0]
