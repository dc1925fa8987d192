"""Explanations name the right cause: each kind of wait, preemption and refusal, forced on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedinfer.cli.main import main
from pagedinfer.errors import RequestTooLargeError
from pagedinfer.tracing.explain import explain
from pagedinfer.tracing.reader import read_trace
from pagedinfer.tracing.recorder import TracingScheduler
from tests.engine import rig as rig_module
from tests.engine.rig import SWAPPING, Rig, prompt_of

MakeRig = Callable[..., Rig]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def make_rig(path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRig:
    def make(swap_in_steps: int = 0, **config: Any) -> Rig:
        monkeypatch.setattr(rig_module, "Scheduler", lambda limits: TracingScheduler(limits, str(path)))
        return Rig(swap_in_steps, **config)

    return make


def told(rig: Rig, path: Path, request_id: str) -> str:
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]
    return " ".join(explain(read_trace(path), request_id))


def test_an_easy_life(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig()
    rig.add("a", prompt_of(10), max_tokens=6)
    text = told(rig, path, "a")
    assert "a arrived at" in text
    assert "with a prompt of 10 tokens, to generate at most 6" in text
    assert "it got a slot: 10 of its 10 prompt tokens were computed." in text
    assert "ran for 5 steps" in text
    assert "It reached its most tokens at" in text
    assert "after 6 tokens" in text
    assert "waited" not in text
    assert "preempted" not in text


def test_no_slot(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(max_num_seqs=2)
    for i in range(3):
        rig.add(f"r{i}", prompt_of(4, first=9 * i), max_tokens=8)
    text = told(rig, path, "r2")
    assert "It waited for" in text
    assert "all 2 slots (max_num_seqs) were taken by requests as urgent (8 steps)" in text


def test_no_tokens(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(max_num_batched_tokens=16)
    rig.add("long", prompt_of(40), max_tokens=2)
    rig.add("next", prompt_of(4, first=20), max_tokens=2)
    text = told(rig, path, "next")
    assert "others took the 16 tokens of a step (max_num_batched_tokens) (2 steps)" in text
    text = " ".join(explain(read_trace(path), "long"))
    assert "Its prompt took 3 steps" in text


def test_no_free_blocks(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(num_blocks=8, max_model_len=32)
    rig.add("large", prompt_of(24), max_tokens=4)
    rig.add("next", prompt_of(12, first=20), max_tokens=2)
    text = told(rig, path, "next")
    assert "too little KV cache was free" in text
    assert "blocks where it needed 2" in text


def test_a_forecast_that_does_not_fit(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(num_blocks=12, max_model_len=48, admission_policy="forecast")
    rig.add("grows", prompt_of(8), max_tokens=30, ignore_eos=True)
    rig.add("next", prompt_of(8, first=20), max_tokens=20, ignore_eos=True)
    text = told(rig, path, "next")
    assert "the KV cache of 12 blocks was expected to run out as those that run grow" in text


def test_behind_another(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(max_num_seqs=1)
    for i in range(3):
        rig.add(f"r{i}", prompt_of(4, first=9 * i), max_tokens=4)
    text = told(rig, path, "r2")
    assert "others were in front of it, the first of which waited since all 1 slots" in text


def test_a_prompt_that_begins_alike(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(long_prefill_token_threshold=16, max_num_batched_tokens=64)
    rig.add("first", prompt_of(40), max_tokens=2)
    rig.add("second", prompt_of(44), max_tokens=2)
    text = told(rig, path, "second")
    assert "a prompt that begins alike was being computed, and to share it is quicker (2 steps)" in text
    assert rig.scheduler.counters.limited_steps["tokens"] == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_a_more_urgent_prompt(chunked: bool, make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(
        scheduling_policy="priority",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        enable_chunked_prefill=chunked,
    )
    rig.add("decoding", prompt_of(4), max_tokens=6, priority=3)
    rig.step()
    rig.add("urgent", prompt_of(8, first=20), max_tokens=2, priority=0)
    rig.add("patient", prompt_of(8, first=30), max_tokens=2, priority=3)
    assert "a more urgent prompt had the step (1 step)" in told(rig, path, "patient")
    text = " ".join(explain(read_trace(path), "decoding"))
    assert "It had a slot and computed nothing: a more urgent prompt had the step (1 step)." in text
    assert rig.scheduler.counters.limited_steps["tokens"] == 0


@pytest.mark.parametrize(
    ("mode", "what"),
    [("swap", "blocks moved to the CPU"), ("recompute", "tokens was dropped, to be computed again")],
)
def test_preempted_for_blocks(mode: str, what: str, make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(num_blocks=6, max_model_len=24, num_cpu_blocks=8, preemption_mode=mode)
    rig.add("old", prompt_of(8), max_tokens=14)
    rig.add("young", prompt_of(8, first=20), max_tokens=14)
    text = told(rig, path, "young")
    assert "it was preempted: old needed blocks, and of those that ran it came last" in text
    assert what in text
    assert "it got a slot and went on" in text or "prompt tokens were computed" in text


def test_a_slot_and_no_block(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(num_blocks=5, max_model_len=20)
    rig.add("old", prompt_of(5), max_tokens=6)
    rig.add("young", prompt_of(10, first=20), max_tokens=6)
    text = told(rig, path, "young")
    assert "It had a slot and computed nothing: no block of the KV cache was left for it (1 step)." in text


def test_preempted_for_a_slot(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(max_num_seqs=1, scheduling_policy="priority", num_cpu_blocks=8)
    rig.add("patient", prompt_of(8), max_tokens=10, priority=3)
    rig.step()
    rig.add("urgent", prompt_of(4, first=20), max_tokens=3, priority=1)
    text = told(rig, path, "patient")
    assert "priority 3" in text
    assert "it was preempted: urgent needed a slot, and of those that ran it was the least urgent" in text


def test_its_kv_comes_from_the_cpu(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(3, **SWAPPING)
    rig.displace_victim()
    text = told(rig, path, "victim")
    assert "Its KV comes from the CPU" in text
    assert "It had a slot and computed nothing: its KV was on its way (" in text


def test_the_prefix_cache(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig()
    rig.add("a", prompt_of(16), max_tokens=2)
    rig.run()
    rig.add("b", prompt_of(16), max_tokens=2)
    assert "4 of its 16 prompt tokens were computed, 12 of which" not in told(rig, path, "a")
    text = " ".join(explain(read_trace(path), "b"))
    assert "4 of its 16 prompt tokens were computed; 12 were in the prefix cache" in text


def test_a_slow_step(make_rig: MakeRig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("pagedinfer.tracing.recorder.time.perf_counter", lambda: clock[0])
    rig = make_rig(max_num_batched_tokens=64, max_model_len=64)
    execute = rig.runner.execute

    def timed(batch: Any) -> Any:
        clock[0] += 0.001 * batch.num_tokens
        return execute(batch)

    rig.runner.execute = timed  # type: ignore[method-assign]
    rig.add("a", prompt_of(4), max_tokens=10)
    rig.step()
    rig.step()
    rig.add("intruder", prompt_of(40, first=7), max_tokens=2)
    text = told(rig, path, "a")
    assert "The longest time between two of its tokens was step 3, 41.0 ms" in text
    assert "it computed 40 prompt tokens of intruder beside it" in text


def test_refused_aborted_failed_and_unfinished(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig(max_model_len=32)
    with pytest.raises(RequestTooLargeError):
        rig.add("huge", prompt_of(40))
    rig.add("aborted", prompt_of(4), max_tokens=9)
    rig.add("failed", prompt_of(4, first=9), max_tokens=9)
    rig.runner.forced_tokens["failed"] = [-1]
    rig.add("left", prompt_of(4, first=20), max_tokens=9)
    rig.step()
    rig.scheduler.abort_request("aborted")
    rig.scheduler.close()  # type: ignore[attr-defined]
    trace = read_trace(path)
    assert "refused, since it could never run: request 'huge'" in explain(trace, "huge")[0]
    assert "was aborted" in explain(trace, "aborted")[-1]
    assert "no token could be sampled" in explain(trace, "failed")[-1]
    assert explain(trace, "left")[-1] == "It had not ended when the trace did."
    with pytest.raises(ValueError, match="no request 'hug'; did you mean huge"):
        explain(trace, "hug")


def test_a_name_that_was_used_twice(make_rig: MakeRig, path: Path) -> None:
    rig = make_rig()
    for max_tokens in (2, 3):
        rig.add("a", prompt_of(4), max_tokens=max_tokens)
        rig.run()
    text = told(rig, path, "a")
    assert text.count("a arrived at") == 2
    assert "after 2 tokens" in text
    assert "after 3 tokens" in text


def test_the_commands(make_rig: MakeRig, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = make_rig(max_num_seqs=2, max_model_len=32)
    for i in range(4):
        rig.add(f"r{i}", prompt_of(8, first=9 * i), max_tokens=6)
    with pytest.raises(RequestTooLargeError):
        rig.add("huge", prompt_of(40))
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]
    assert main(["explain", str(path)]) == 0
    assert "r3: " in capsys.readouterr().out
    assert main(["explain", str(path), "--request", "r3"]) == 0
    assert "all 2 slots" in capsys.readouterr().out
    assert main(["explain", str(path), "--request", "none"]) == 1
    assert main(["replay", str(path), "--max-num-seqs", "1", "4", "--preemption-mode", "swap"]) == 0
    text = capsys.readouterr().out
    assert "the same schedule" in text
    assert "max_num_seqs=4, preemption_mode=swap" in text
    assert "output tokens/s" in text
    assert "refused and are not replayed, since the trace lacks their lengths: 1" in text
    plot = path.with_suffix(".svg")
    if main(["replay", str(path), "--plot", str(plot), "--json"]) == 0:
        assert plot.read_text().count("<path") > 10
    else:
        assert "matplotlib" in capsys.readouterr().err
