"""The one error of a build: a line that says what is wrong and what to do."""

from __future__ import annotations


class BuildError(Exception):
    """The build cannot go on; the message is one line for the user, without a traceback."""


def say(line: str) -> None:
    """Prints one line of the build's own, so marked that it is found among pip's and ninja's."""
    print(f"pagedinfer: {line}", flush=True)
