"""The short forms of the trials."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.rig import ServerThread
from tests.server.trials import load, schema, streams


def test_load_loses_and_mixes_up_nothing(server: ServerThread, model: str) -> None:
    bodies = load.requests(30)
    right = load.alone(model, bodies)
    pid = server.server.service.engine.pid
    assert pid is not None
    found = asyncio.run(load.Clients(server, [pid], bodies, right).run(60, 2.0))
    assert found.faults == []
    assert found.num_requests > 30
    assert found.num_left > 0


def test_streams_carry_every_token(model: str) -> None:
    found = streams.measure(model, streams=32, tokens=25, rate=800)
    assert found.num_tokens == 800
    assert 400 < found.num_chunks <= 800


def test_requests_by_the_schema(model: str) -> None:
    pytest.importorskip("schemathesis")
    assert schema.num_cases(schema.run(model, 18, scripted=True)) >= 9
