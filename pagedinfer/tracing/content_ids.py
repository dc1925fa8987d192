"""Names for what blocks hold: a trace tells which prompts begin alike, and not what they say."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 500_000  # blocks that are remembered; beyond it all are forgotten, and what comes later looks new

Ranges = list[list[int]]
"""Ids of consecutive blocks as [first, count] pairs: a chain's ids mostly follow each other."""


class ContentIds:
    """Gives each full block an id by its tokens and all before it; equal sequences get equal ids."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: dict[tuple[int, int], int] = {}  # by the id before it and a hash of its tokens
        self._next = 1

    def ranges(self, tokens: Sequence[int], salt: str = "") -> Ranges:
        """The ids of the full blocks of a sequence."""
        size, ids = self._block_size, self._ids
        if len(ids) > _MOST:
            ids.clear()
        parent = -1 - abs(hash(salt)) if salt else 0
        ranges: Ranges = []
        for start in range(0, len(tokens) - size + 1, size):
            key = (parent, hash(tuple(tokens[start : start + size])))
            found = ids.get(key)
            if found is None:
                found = ids[key] = self._next
                self._next += 1
            if ranges and found == sum(ranges[-1]):
                ranges[-1][1] += 1
            else:
                ranges.append([found, 1])
            parent = found
        return ranges


def expand(ranges: Ranges) -> list[int]:
    """One id for each block."""
    return [first + i for first, count in ranges for i in range(count)]
