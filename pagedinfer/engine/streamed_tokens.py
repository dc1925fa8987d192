"""The tokens of a step of which there is nothing else to tell, as columns: no object is made for each."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamedTokens:
    """One token each of some choices that go on, in two columns of the same length."""

    streams: list[int] = field(default_factory=list)  # which choices: the numbers that they go by
    token_ids: list[int] = field(default_factory=list)
