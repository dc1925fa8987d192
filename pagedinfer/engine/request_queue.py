"""The requests that wait, the most urgent first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from pagedinfer.engine.request import Request

_by_urgency = attrgetter("urgency")
_GAP = 64


class RequestQueue:
    """Requests sorted by `urgency`, which is unique and does not change while a request is in here.

    A newcomer, mostly the least urgent, goes to the end of a list, and the most urgent one is taken from
    a gap that grows at its front, closed from time to time: both are O(1), however long the queue is.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._first = 0  # what is in front of it has been taken out

    def __len__(self) -> int:
        return len(self._requests) - self._first

    def __iter__(self) -> Iterator[Request]:
        """From the most urgent on."""
        return islice(self._requests, self._first, None)

    def first(self) -> Request:
        return self._requests[self._first]

    def pop(self) -> Request:
        """Takes out the most urgent one."""
        request = self._requests[self._first]
        self._first += 1
        if self._first == _GAP:
            del self._requests[:_GAP]
            self._first = 0
        return request

    def add(self, request: Request) -> None:
        insort(self._requests, request, lo=self._first, key=_by_urgency)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.urgency, lo=self._first, key=_by_urgency)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not waiting")
        del self._requests[index]
