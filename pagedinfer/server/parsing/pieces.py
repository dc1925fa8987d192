"""What the text of a chat model is made of, and how parsers give it. Parsers take text as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of what the model thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, whole; the arguments are a JSON object as text."""

    name: str
    arguments: str


Piece = Content | Reasoning | Call


class Parser(Protocol):
    """Takes the text of one choice in parts. The pieces do not depend on how it was cut into parts,
    except that contents and reasonings come in more or fewer of them.
    """

    def feed(self, text: str) -> list[Piece]:
        """What is known after this part; the rest is held back."""
        ...

    def finish(self) -> list[Piece]:
        """The rest, since nothing more comes."""
        ...


class PlainParser:
    """Everything is the answer."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Chain:
    """One parser after another: what the first takes for the answer is the text of the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Piece]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Piece]:
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    def _pass_on(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._second.feed(piece.text) if isinstance(piece, Content) else [piece]
        return found
