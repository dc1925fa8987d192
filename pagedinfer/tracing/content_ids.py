"""Names for what blocks hold: a trace tells which prompts begin alike, and not what they say."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_MOST = 500_000  # blocks that are remembered; beyond it all are forgotten, and what comes later looks new
_TOKEN_BYTES = 8

Ranges = list[list[int]]
"""Ids of consecutive blocks as [first, count] pairs: a chain's ids mostly follow each other."""


class ContentIds:
    """Gives each full block an id by its tokens and all before it; equal sequences get equal ids."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: dict[tuple[int, int], int] = {}  # by the id before it and a hash of its tokens
        self._next = 1

    def ranges(self, tokens: Sequence[int], salt: str = "", known: Ranges | None = None) -> Ranges:
        """The ids of the full blocks of a sequence, of which the first have those in `known`."""
        ids = self._ids
        if len(ids) > _MOST:
            ids.clear()
        ranges = [pair.copy() for pair in known or ()]
        num_known = sum(count for _, count in ranges)
        parent = sum(ranges[-1]) - 1 if ranges else -1 - abs(hash(salt)) if salt else 0
        content = array("q", tokens[num_known * self._block_size :]).tobytes()
        size = self._block_size * _TOKEN_BYTES
        for end in range(size, len(content) + 1, size):
            key = (parent, hash(content[end - size : end]))
            found = ids.get(key)
            if found is None:
                found = ids[key] = self._next
                self._next += 1
            if found == parent + 1 and ranges:
                ranges[-1][1] += 1
            else:
                ranges.append([found, 1])
            parent = found
        return ranges


def expand(ranges: Ranges) -> list[int]:
    """One id for each block."""
    return [first + i for first, count in ranges for i in range(count)]
