"""The rules of tuning: each fires for its fault and for nothing else, and a good engine gets no advice."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.advice import RULES, Facts, advise, guide
from pagedinfer.engine.advisor import Advisor
from tests.engine.rig import Rig, prompt_of

GOOD = Facts(
    device="cuda",
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=8192,
    num_kv_tokens=400_000,
    num_cpu_blocks=2048,
    gpu_memory_utilization=0.92,
    enable_prefix_caching=True,
    enforce_eager=False,
    scheduling_policy="fcfs",
    watermark=0.0,
    repetition_penalty=1.0,
    num_steps=1000,
    num_finished=100,
    num_preemptions=2,
    limited_steps={"slots": 20, "blocks": 30, "tokens": 50},
    mean_running=120.0,
    kv_cache_usage=0.5,
)
FAULTS: dict[str, dict[str, Any]] = {
    "memory-too-tight": {"gpu_memory_utilization": 0.98},
    "thrashing": {"num_preemptions": 40},
    "too-few-slots": {"limited_steps": {"slots": 600}},
    "too-little-cache": {"limited_steps": {"blocks": 600}, "kv_cache_usage": 0.99},
    "too-little-cache-on-a-cpu": {
        "limited_steps": {"blocks": 600},
        "kv_cache_usage": 0.99,
        "device": "cpu",
    },
    "steps-too-small": {"limited_steps": {"tokens": 600}},
    "fewer-tokens-than-slots": {"max_num_batched_tokens": 128},
    "nowhere-to-swap": {"num_preemptions": 40, "num_recomputed": 40, "num_cpu_blocks": 0},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "long-steps-before-urgent": {"scheduling_policy": "priority"},
    "idle-cache": {"watermark": 0.5},
    "penalty-by-default": {"repetition_penalty": 1.1},
}


def names(facts: Facts) -> list[str]:
    return [advice.rule for advice in advise(facts)]


def test_a_good_engine_gets_no_advice() -> None:
    assert advise(GOOD) == []
    assert advise(Facts()) == []
    assert advise(Facts(device="cpu")) == []


def test_every_rule_has_a_fault() -> None:
    assert [rule.name for rule in RULES] == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str) -> None:
    facts = replace(GOOD, **FAULTS[name])
    expected = ["thrashing", name] if name == "nowhere-to-swap" else [name]
    assert names(facts) == expected
    advice = advise(facts)[-1]
    rule = next(rule for rule in RULES if rule.name == name)
    assert advice.parameter == rule.parameter
    assert str(advice) == f"{advice.parameter}={advice.value}: {advice.why}"


def test_what_is_tried_is_another_value() -> None:
    few = replace(GOOD, max_num_seqs=8, limited_steps={"slots": 900}, kv_cache_usage=0.1)
    assert advise(few)[0].value == "64"
    many = replace(GOOD, num_preemptions=40, mean_running=50.0)
    assert advise(many)[0].value == "45"


def test_few_steps_tell_nothing() -> None:
    facts = replace(GOOD, num_steps=20, limited_steps={"slots": 20}, num_finished=2, num_preemptions=2)
    assert advise(facts) == []


def test_a_full_cache_is_not_helped_by_slots() -> None:
    assert names(replace(GOOD, limited_steps={"slots": 600}, kv_cache_usage=0.9)) == []


def test_the_guide_is_current() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "tuning.md"
    assert path.read_text(encoding="utf-8") == guide(), "run python scripts/write_tuning_guide.py"
    for rule in RULES:
        assert f"| {rule.name} |" in guide()


# ---- while an engine runs ----


def advisor_of(rig: Rig, **config: Any) -> Advisor:
    return Advisor(EngineConfig(model="m", **config), rig.scheduler, device="cpu")


def run(rig: Rig, advisor: Advisor, num_requests: int, prompt: int, output: int) -> list[str]:
    for i in range(num_requests):
        rig.add(f"r{i}", prompt_of(prompt, first=i), max_tokens=output)
    while rig.scheduler.has_unfinished_requests():
        rig.step()
        advisor.note_step()
    return names(advisor.facts())


def test_an_engine_with_room() -> None:
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=200)
    assert run(rig, advisor_of(rig), 8, 8, 60) == []


def test_too_few_slots() -> None:
    rig = Rig(max_num_seqs=1, num_blocks=200)
    assert run(rig, advisor_of(rig), 8, 8, 20) == ["too-few-slots"]


def test_too_little_cache() -> None:
    rig = Rig(max_num_seqs=8, num_blocks=16, admission_policy="forecast")
    assert run(rig, advisor_of(rig), 16, 8, 40) == ["too-little-cache-on-a-cpu"]


def test_too_few_tokens() -> None:
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=8, num_blocks=200)
    assert "steps-too-small" in run(rig, advisor_of(rig), 24, 40, 4)


def test_more_requests_than_the_cache_holds() -> None:
    rig = Rig(max_num_seqs=8, num_blocks=20, admission_policy="greedy", preemption_mode="recompute")
    assert "thrashing" in run(rig, advisor_of(rig), 16, 4, 50)


def test_urgent_requests_that_displace_others_are_no_fault() -> None:
    rig = Rig(max_num_seqs=2, num_blocks=200, scheduling_policy="priority")
    advisor = advisor_of(rig)
    for i in range(16):
        rig.add(f"r{i}", prompt_of(4, first=i), max_tokens=4, priority=16 - i)
        rig.step()
        advisor.note_step()
    assert rig.scheduler.counters.num_preemptions > 2
    rig.run()
    assert "thrashing" not in names(advisor.facts())


def test_warnings_are_rare(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedinfer.engine.advisor._STEPS", 60)
    monkeypatch.setattr(logging.getLogger("pagedinfer"), "propagate", True)
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pagedinfer.engine.advisor.time", clock)
    rig = Rig(max_num_seqs=1, num_blocks=200)
    advisor = advisor_of(rig, watermark=0.0)
    run(rig, advisor, 16, 8, 30)  # eight times sixty steps
    assert caplog.text.count("advice (too-few-slots): try max_num_seqs=") == 1
    now[0] += 700.0
    rig.ends.clear()
    run(rig, advisor, 6, 8, 30)
    assert caplog.text.count("advice (too-few-slots)") == 2


def test_a_parameter_is_warned_of_at_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pagedinfer"), "propagate", True)
    rig = Rig(max_num_seqs=16, max_num_batched_tokens=8, num_blocks=200, enable_prefix_caching=False)
    advisor_of(rig).warn_at_start()
    assert "advice (fewer-tokens-than-slots): try max_num_batched_tokens=32" in caplog.text
    assert "advice (no-prefix-cache)" in caplog.text
