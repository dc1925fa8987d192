"""Logging goes to stderr, once, and only if the application has not set up its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagedinfer.logging import LEVEL_VARIABLE, configure, get_logger


@contextmanager
def fresh_process() -> Iterator[logging.Logger]:
    """No handlers and no level, as in a fresh process; pytest's and ours come back at the end."""
    root, package = logging.getLogger(), logging.getLogger("pagedinfer")
    before = root.handlers, package.handlers, package.level
    root.handlers, package.handlers = [], []
    package.setLevel(logging.NOTSET)
    try:
        yield package
    finally:
        root.handlers, package.handlers = before[:2]
        package.setLevel(before[2])


@pytest.fixture(autouse=True)
def no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)


def test_records_go_to_stderr_once(capfd: pytest.CaptureFixture[str]) -> None:
    with fresh_process():
        configure()
        configure()
        get_logger("pagedinfer.x").info("weights loaded")
        get_logger("pagedinfer.x").debug("not shown")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("weights loaded") == 1
    assert "pagedinfer.x" in err
    assert "not shown" not in err


@pytest.mark.parametrize(("level", "shown"), [("debug", True), ("WARNING", False)])
def test_the_level_comes_from_the_environment(
    level: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    with fresh_process():
        configure()
        get_logger("pagedinfer.x").info("a record")
    assert ("a record" in capfd.readouterr().err) == shown


def test_an_unknown_level_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "LOUD")
    with pytest.raises(ValueError, match=r"PAGEDINFER_LOGGING_LEVEL must be one of DEBUG.*'LOUD'"):
        configure()


def test_the_application_s_handlers_are_respected(capfd: pytest.CaptureFixture[str]) -> None:
    with fresh_process() as package:
        logging.getLogger().addHandler(logging.NullHandler())
        configure()
        assert package.handlers == []
        get_logger("pagedinfer.x").info("quiet")
    assert capfd.readouterr().err == ""
