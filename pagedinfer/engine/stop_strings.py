"""Stop strings in a text that comes in pieces. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes a text on until one of the strings appears in it; holds back what could begin one.

    The string that ends first in the text counts; of two that end together, the one that begins first. So
    the result does not depend on the pieces in which the text came.

    Args:
        strings: not empty, any number.
        include: whether the string itself is passed on.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""
        self._before = ""  # what precedes the held text, as far back as a string can reach
        self.found: str | None = None
        """The string that has ended the text."""

    def append(self, text: str, *, honour: bool = True) -> str:
        """What can be passed on of this piece and of what was held.

        Args:
            text: the piece; nothing may come after a string was found.
            honour: whether a string that ends in this piece ends the text.
        """
        if not self._strings:
            return text
        if not text:
            return ""
        seen = self._before + self._held
        whole = seen + text
        shown = len(self._before)
        stop = self._find(whole, len(seen)) if honour else None
        if stop is not None:
            start, self.found = stop
            self._held = ""
            return whole[shown : start + len(self.found) if self._include else start]
        hold = 0 if self._include else could_begin(whole, self._strings)
        end = max(shown, len(whole) - hold)
        self._held = whole[end:]
        self._before = whole[max(0, end - self._longest + 1) : end]
        return whole[shown:end]

    def finish(self) -> str:
        """What is still held, once it is known that nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, seen: int) -> tuple[int, str] | None:
        """Where the first string that ends beyond `seen` begins, and which it is."""
        first: tuple[int, int, str] | None = None
        for string in self._strings:
            start = text.find(string, max(0, seen - len(string) + 1))
            if start >= 0 and (first is None or (start + len(string), start) < first[:2]):
                first = (start + len(string), start, string)
        return None if first is None else first[1:]


def could_begin(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a mark, but not all of it."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
