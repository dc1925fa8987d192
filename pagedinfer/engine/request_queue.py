"""The requests that wait, the most urgent first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pagedinfer.engine.request import Request


class RequestQueue:
    """Requests sorted by `urgency`, which is unique and does not change while a request is in here.

    Looking at the first and taking it out are O(1); the rest is a binary search and one memmove.
    """

    def __init__(self) -> None:
        self._reversed: list[Request] = []  # the most urgent last

    def __len__(self) -> int:
        return len(self._reversed)

    def __iter__(self) -> Iterator[Request]:
        """From the most urgent on."""
        return reversed(self._reversed)

    def first(self) -> Request:
        return self._reversed[-1]

    def pop(self) -> Request:
        """Takes out the most urgent one."""
        return self._reversed.pop()

    def add(self, request: Request) -> None:
        insort(self._reversed, request, key=_descending)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._reversed, _descending(request), key=_descending)
        if index == len(self._reversed) or self._reversed[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not waiting")
        del self._reversed[index]


def _descending(request: Request) -> tuple[int, int, int]:
    priority, arrival, sequence = request.urgency
    return (-priority, -arrival, -sequence)
