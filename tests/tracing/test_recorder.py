"""The trace file: what stands in it, that other tools can open it, and what it survives."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pagedinfer.engine.scheduler import SchedulerConfig
from pagedinfer.errors import RequestTooLargeError
from pagedinfer.tracing.content_ids import ContentIds, expand
from pagedinfer.tracing.reader import read_trace
from pagedinfer.tracing.recorder import TracingScheduler
from pagedinfer.tracing.replay import replay
from tests.engine import rig as rig_module
from tests.engine.rig import Rig, prompt_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def rig(path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A small traced pool, from which somebody is preempted."""
    monkeypatch.setattr(rig_module, "Scheduler", lambda config: TracingScheduler(config, str(path)))
    return Rig(num_blocks=8, max_model_len=32, num_cpu_blocks=8, preemption_mode="swap")


def run(rig: Rig) -> None:
    for i in range(3):
        rig.add(f"r{i}", prompt_of(8, first=9 * i), max_tokens=12)
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]


def events(path: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(path.read_text())
    return [event for event in content if event]


def test_it_is_a_trace_event_file(rig: Rig, path: Path) -> None:
    """Valid JSON; every slice that begins ends, slices of a request one after another."""
    run(rig)
    open_slices: dict[str, str] = {}
    for event in events(path):
        assert {"ph", "name", "pid", "ts"} <= set(event)
        if event["ph"] == "b":
            assert event["id"] not in open_slices
            open_slices[event["id"]] = event["name"]
        elif event["ph"] == "e":
            assert open_slices.pop(event["id"]) == event["name"]
    assert open_slices == {}
    names = {event["name"] for event in events(path) if event["ph"] == "b"}
    assert {"waiting", "running", "swapped"} <= names


def test_steps_follow_each_other(rig: Rig, path: Path) -> None:
    run(rig)
    steps = [event for event in events(path) if event["name"] == "step" and event["ph"] == "X"]
    for step, following in pairwise(steps):
        assert abs(step["ts"] + step["dur"] - following["ts"]) <= 1


def test_who_gave_way_and_what_was_lacking(rig: Rig, path: Path) -> None:
    run(rig)
    trace = read_trace(path)
    preempted = [each for step in trace.steps for each in step.preempted]
    assert len(preempted) == rig.num_preemptions > 0
    request_id, by, lack, kind, num_tokens, num_blocks = preempted[0]
    assert (request_id, lack, kind) == ("r2", "blocks", "swap")
    assert by in ("r0", "r1")
    assert 8 <= num_tokens <= 4 * num_blocks
    refusals = [step.refusal for step in trace.steps if step.refusal is not None]
    assert refusals[0] == ["r2", "blocks", *refusals[0][2:]]
    assert sum(out for out, _ in (step.swaps for step in trace.steps)) > 0


def test_no_token_is_written(rig: Rig, path: Path) -> None:
    tokens = [987654321 + 7 * i for i in range(12)]
    rig.add("secret", tokens, max_tokens=3)
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]
    content = path.read_text()
    assert "secret" in content
    assert not any(str(token) in content for token in tokens)


def test_refusals_and_calls(rig: Rig, path: Path) -> None:
    with pytest.raises(RequestTooLargeError, match="max_model_len"):
        rig.scheduler.add_request(rig_module.make_request("long", prompt_of(40)))
    rig.add("a", prompt_of(8), max_tokens=4)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.scheduler.abort_all()
    rig.scheduler.close()  # type: ignore[attr-defined]
    trace = read_trace(path)
    assert [(name, "max_model_len" in message) for _, name, message in trace.refused] == [("long", True)]
    assert [name for _, name in trace.calls] == ["reset_prefix_cache", "abort_all"]
    assert trace.ended["a"][0].reason == "abort"


def test_a_step_that_fails(rig: Rig, path: Path) -> None:
    for name in "abc":
        rig.add(name, prompt_of(8), max_tokens=4)
    rig.step()
    rig.scheduler.schedule()
    rig.scheduler.recover(["a", "long gone"])
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]
    trace = read_trace(path)
    assert [name for _, name in trace.calls] == ["recover"]
    assert [(trace.ended[name][0].reason, trace.ended[name][0].outside) for name in "abc"] == [
        ("error", True),
        ("length", False),
        ("length", False),
    ]
    assert all(step.same for step in replay(trace))


@pytest.mark.parametrize("compressed", [False, True])
def test_what_a_dead_process_left_can_be_read(rig: Rig, path: Path, compressed: bool) -> None:
    run(rig)
    whole = read_trace(path)
    content = path.read_bytes()
    if compressed:
        path = path.with_suffix(".json.gz")
        content = gzip.compress(content)
    path.write_bytes(content[: int(0.8 * len(content))])
    trace = read_trace(path)
    assert 0 < len(trace.steps) < len(whole.steps)
    assert trace.steps == whole.steps[: len(trace.steps)]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"name": "other"}', "\x00\x01", '[\n{"ph":"X","name":"step"},\n']
)
def test_what_is_no_trace_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(ValueError, match=r"is no trace of pagedinfer"):
        read_trace(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        read_trace(tmp_path / "none.json")
    config = SchedulerConfig(num_blocks=4, max_model_len=8)
    with pytest.raises(ValueError, match=r"cannot be written to .*: No such file"):
        TracingScheduler(config, str(tmp_path / "none" / "t.json"))


def test_a_newer_format_is_refused(rig: Rig, path: Path) -> None:
    run(rig)
    path.write_text(path.read_text().replace('"format":1', '"format":2'))
    with pytest.raises(ValueError, match="format 2; this version reads up to 1"):
        read_trace(path)


def test_content_ids_tell_what_is_equal() -> None:
    contents = ContentIds(4)
    first = contents.ranges(range(13))
    assert first == [[1, 3]]
    assert contents.ranges([*range(8), 9, 9, 9, 9]) == [[1, 2], [4, 1]]
    assert contents.ranges(range(13), "salt") == [[5, 3]]
    assert contents.ranges([0, 1, 2]) == []
    assert expand([[1, 2], [4, 1]]) == [1, 2, 4]
