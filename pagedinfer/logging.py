"""Logging of the whole package: the standard library's, to stderr, set up when an engine starts.

Importing pagedinfer configures nothing. `configure` adds a handler to the logger "pagedinfer" unless the
application has given it, or the root logger, one of its own.
"""

from __future__ import annotations

import logging
import os
import sys

LEVEL_VARIABLE = "PAGEDINFER_LOGGING_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, whose `__name__` begins with "pagedinfer"."""
    return logging.getLogger(name)


def configure() -> None:
    """Sends the package's records to stderr, from the level in PAGEDINFER_LOGGING_LEVEL (INFO) on.

    Raises:
        ValueError: PAGEDINFER_LOGGING_LEVEL is not a level's name.
    """
    logger = logging.getLogger("pagedinfer")
    level = os.environ.get(LEVEL_VARIABLE, "").upper()
    if level and level not in _LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(_LEVELS)}, got {level!r}")
    if level:
        logger.setLevel(level)
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level or "INFO")


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at the time, which tests and notebooks replace."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
