"""Reasoning between <think> and </think>, as DeepSeek-R1, Qwen3 and many after them write it."""

from __future__ import annotations

from pagedinfer.engine.stop_strings import could_begin
from pagedinfer.server.parsing.pieces import Content, Piece, Reasoning

BEGIN, END = "<think>", "</think>"


class ThinkParser:
    """Splits the reasoning off. Space around it belongs to neither part.

    Args:
        inside: the prompt ends with <think> already, so that the text begins in the middle.
    """

    def __init__(self, *, inside: bool) -> None:
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._is_first = True

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(BEGIN):
                self._state, self._held = "reasoning", begun[len(BEGIN) :]
            elif BEGIN.startswith(begun):
                return []
            else:
                self._state = "content"
        if self._state == "reasoning":
            found += self._reasoning()
        if self._state == "after":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        if self._state == "content" and self._held:
            found.append(Content(self._held))
            self._held = ""
        return found

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state == "reasoning":
            held = held.rstrip()
            return [Reasoning(held.lstrip() if self._is_first else held)] if held else []
        return [Content(held)] if held and self._state == "start" else []

    def _reasoning(self) -> list[Piece]:
        end = self._held.find(END)
        if end >= 0:
            text, self._held = self._held[:end].rstrip(), self._held[end + len(END) :]
            self._state = "after"
        else:
            text = self._held[: len(self._held) - could_begin(self._held, (END,))].rstrip()
            self._held = self._held[len(text) :]
        if self._is_first:
            text = text.lstrip()
            self._is_first = not text
        return [Reasoning(text)] if text else []


def prompt_ends_inside(prompt: str) -> bool:
    """Whether a prompt leaves the model in the middle of its reasoning."""
    return prompt.rstrip().endswith(BEGIN)
