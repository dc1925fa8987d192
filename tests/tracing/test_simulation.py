"""The cost model, and runs with other parameters on its clock."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from pagedinfer.engine.batch import Batch, ScheduledRequest
from pagedinfer.tracing.cost_model import features, fit
from pagedinfer.tracing.reader import read_trace
from pagedinfer.tracing.recorder import TracingScheduler
from pagedinfer.tracing.records import Trace
from pagedinfer.tracing.simulation import Run, simulate, traced_run
from tests.engine import rig as rig_module
from tests.engine.rig import Rig, prompt_of


def cost(batch: Batch) -> float:
    return 1e-3 * (5.0 + 0.02 * len(batch.requests) + 0.05 * batch.num_tokens)


def decodes(count: int, context: int = 200) -> list[ScheduledRequest]:
    return [ScheduledRequest("d", 0, context, 1, True, []) for _ in range(count)]


def prompt(num_tokens: int) -> ScheduledRequest:
    return ScheduledRequest("p", 1, 0, num_tokens, True, [])


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Twelve requests on four slots, of which one ends early; its steps take what `cost` says."""
    path = tmp_path / "trace.json"
    clock = [0.0]
    monkeypatch.setattr("pagedinfer.tracing.recorder.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(rig_module, "Scheduler", lambda config: TracingScheduler(config, str(path)))
    rig = Rig(num_blocks=40, max_model_len=64)
    draw = random.Random(0)
    for i in range(12):
        prompt = prompt_of(draw.randint(4, 30), first=i)
        rig.add(f"r{i}", prompt, max_tokens=draw.randint(4, 20), eos_token_ids=frozenset([49]))
    execute = rig.runner.execute

    def timed(batch: Batch):  # type: ignore[no-untyped-def]
        clock[0] += cost(batch)
        return execute(batch)

    rig.runner.execute = timed  # type: ignore[method-assign]
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]
    return read_trace(path)


def test_the_fit_finds_what_steps_cost() -> None:
    draw = random.Random(1)
    steps = []
    for _ in range(300):
        work = [request for _ in range(draw.randint(1, 64)) for request in decodes(1, draw.randint(1, 900))]
        if draw.random() < 0.3:
            work.append(prompt(draw.randint(2, 500)))
        batch = Batch(1, requests=work)
        steps.append((features(batch), cost(batch) * draw.choice([0.99, 1.0, 1.01])))
    steps += [(steps[0][0], 10.0)] * 3  # somebody else had the machine
    model = fit(steps)
    assert 1e3 * model.seconds["step"] == pytest.approx(5.0, rel=0.03)
    assert 1e3 * model.seconds["token beyond 128"] == pytest.approx(0.05, rel=0.05)
    assert 1e3 * (model.seconds["token"] + model.seconds["request"]) == pytest.approx(0.07, rel=0.05)
    assert model.error < 0.02
    assert all(seconds >= 0 for seconds in model.seconds.values())
    assert "ms a step" in model.describe()


def test_the_fit_of_a_gpu() -> None:
    """Up to 200 tokens cost little. One large step alone tells what many prompt tokens cost, and counts."""

    def gpu(batch: Batch) -> float:
        return 4.5e-3 + 3e-6 * len(batch.requests) + 20e-6 * max(0, batch.num_tokens - 200)

    draw = random.Random(1)
    steps = []
    for i in range(600):
        work = [request for _ in range(64 - i // 10) for request in decodes(1, draw.randint(100, 300))]
        if i == 0:
            work = [prompt(draw.randint(64, 256)) for _ in range(64)]
        elif i % 3 == 0:
            work.append(prompt(draw.randint(64, 256)))
        batch = Batch(i, requests=work)
        steps.append((features(batch), gpu(batch) * draw.uniform(0.97, 1.03)))
    model = fit(steps)
    for work in ([prompt(160)] * 200, decodes(256), [*decodes(256), prompt(160)]):
        batch = Batch(0, requests=work)
        assert model.predict(batch) == pytest.approx(gpu(batch), rel=0.15)


def test_the_fit_of_a_cpu() -> None:
    """Some rows together are quicker than one by one: 32 requests do not tell what 8 take, but 1 to 32 do."""

    def cpu(batch: Batch) -> float:
        return 0.8e-3 + 60e-6 * min(16, batch.num_tokens) + 8e-6 * max(0, batch.num_tokens - 16)

    draw = random.Random(1)
    steps = []
    for i in range(600):  # at the end they leave one by one
        batch = Batch(i, requests=decodes(min(32, 1 + (599 - i) // 3), draw.randint(100, 300)))
        others = 1.3 if 200 < i < 300 else 1.0  # somebody else wanted the machine for a while
        steps.append((features(batch), others * cpu(batch) * draw.uniform(0.97, 1.03)))
    model = fit(steps)
    for count in (4, 8, 16, 24, 32):
        batch = Batch(0, requests=decodes(count))
        assert model.predict(batch) == pytest.approx(cpu(batch), rel=0.1)


def test_more_tokens_than_any_step_had_cost_as_the_last_ones() -> None:
    steps = [Batch(i, requests=decodes(1 + i % 12)) for i in range(100)]
    model = fit([(features(step), cost(step)) for step in steps])
    batch = Batch(0, requests=decodes(300))
    assert model.predict(batch) == pytest.approx(cost(batch), rel=0.05)


def test_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="no steps"):
        fit([])


def test_its_own_parameters_give_the_same_run(trace: Trace) -> None:
    traced, costs, num_different = traced_run(trace)
    assert num_different == 0
    same = simulate(trace, {}, costs, "same")
    assert same.seconds == pytest.approx(traced.seconds, rel=0.02)
    assert [times.num_tokens for times in same.times] == [times.num_tokens for times in traced.times]
    assert np.mean(same.waits()) == pytest.approx(np.mean(traced.waits()), rel=0.05)
    assert len(same.load) == len(traced.load)


def test_other_parameters(trace: Trace) -> None:
    traced, costs, _ = traced_run(trace)
    fewer = simulate(trace, {"max_num_seqs": 1}, costs, "fewer")
    more = simulate(trace, {"max_num_seqs": 12}, costs, "more")
    assert fewer.tokens_per_second < 0.5 * traced.tokens_per_second
    assert more.tokens_per_second > 1.2 * traced.tokens_per_second
    assert np.mean(more.waits()) < np.mean(traced.waits()) < np.mean(fewer.waits())
    tight = simulate(trace, {"num_blocks": 16, "admission_policy": "greedy"}, costs, "tight")
    assert tight.num_preemptions > 0
    short = simulate(trace, {"max_model_len": 16}, costs, "short")
    assert short.num_refused > 0
    with pytest.raises(ValueError, match="max_num_seqs"):
        simulate(trace, {"max_num_seqs": 0}, costs, "none")


def test_an_empty_run() -> None:
    run = Run("nothing")
    assert (run.seconds, run.tokens_per_second, run.waits()) == (0.0, 0.0, [])


def test_who_comes_and_goes_during_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "short.json"
    monkeypatch.setattr(rig_module, "Scheduler", lambda config: TracingScheduler(config, str(path)))
    rig = Rig()
    rig.add("a", prompt_of(5), max_tokens=3)
    batch = rig.scheduler.schedule()
    rig.add("b", prompt_of(5), max_tokens=3)
    rig.scheduler.abort_request("b")
    rig.apply(rig.scheduler.update(batch, rig.runner.execute(batch).result()))
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]
    traced, _, num_different = traced_run(read_trace(path))
    assert num_different == 0
    assert [times.num_tokens for times in traced.times] == [3, 0]
