"""What the tests of the server share: one server of a tiny model, and one that repeats its prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.server.rig import Client, ServerThread

pytest.importorskip("fastapi")
pytest.importorskip("zmq")

SCRIPTED_ENGINE = (sys.executable, str(Path(__file__).parent / "scripted_engine.py"))
"""The command of an engine that gives each prompt back; see there."""

FAILING_ENGINE = (sys.executable, str(Path(__file__).parent / "failing_engine.py"))
"""The command of an engine with a model whose steps may fail; see there."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model(tiny_llama: TinyModel) -> str:
    """The folder of a tiny model without a chat template."""
    return tiny_llama.path


@pytest.fixture(scope="session")
def server(model: str) -> Iterator[Client]:
    """Of the tiny model, named "tiny"."""
    settings = {"served_model_names": ("tiny", "alias")}
    with ServerThread(model, settings=settings, chat_template=CHAT_TEMPLATE) as server:
        yield server


@pytest.fixture(scope="session")
def echo(model: str) -> Iterator[Client]:
    """Of the scripted engine, named "echo"."""
    settings = {"served_model_names": ("echo",)}
    with ServerThread(
        model, settings=settings, scripted=True, chat_template=CHAT_TEMPLATE, max_model_len=4096
    ) as server:
        yield server
