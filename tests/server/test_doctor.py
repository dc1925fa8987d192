"""`pagedinfer doctor --url` on a server that runs."""

from __future__ import annotations

import pytest

from pagedinfer.cli.main import main
from pagedinfer.planning.server_facts import facts_from_metrics
from tests.server.rig import Client


def test_a_server_tells_the_doctor_everything(server: Client, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        server.complete("abc", max_tokens=5)
    facts = facts_from_metrics(server.get("/metrics").body.decode())
    unknown = {name for name in facts.__dataclass_fields__ if getattr(facts, name) is None}
    assert unknown == set()
    assert facts.device == "cpu"
    assert facts.num_steps >= 15
    assert facts.num_finished >= 3
    # Whether there is advice depends on what the tests before have done with this server.
    main(["doctor", "--url", f"http://127.0.0.1:{server.port}"])
    assert "requests finished" in capsys.readouterr().out
