"""What the tests of the server share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import TinyModel

SCRIPTED_ENGINE = (sys.executable, str(Path(__file__).parent / "scripted_engine.py"))
"""The command of an engine that gives each prompt back; see there."""


@pytest.fixture(scope="session")
def model(tiny_llama: TinyModel) -> str:
    """The folder of a tiny model."""
    return tiny_llama.path
