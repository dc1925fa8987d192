"""A traced run, scheduled again from its file: the same, step for step."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pagedinfer import LLM, BeamSearchParams, LLMEngine, SamplingParams, tracing
from pagedinfer.config import EngineConfig
from pagedinfer.engine.scheduler import Scheduler, SchedulerConfig
from pagedinfer.tracing.reader import read_trace
from pagedinfer.tracing.recorder import TracingScheduler
from pagedinfer.tracing.replay import replay
from tests.conftest import TinyModel
from tests.engine import rig as rig_module
from tests.engine.fake_runner import expected_output
from tests.engine.test_scheduler_machine import run_trace

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BLOCK_BYTES = 1 << 40


def traced_rig(path: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> rig_module.Rig:
    """A rig whose scheduler writes a trace, as if of an engine with enormous blocks."""
    engine = {"block_bytes": BLOCK_BYTES}
    monkeypatch.setattr(rig_module, "Scheduler", lambda config: TracingScheduler(config, str(path), engine))
    rig = rig_module.Rig(**config)
    rig.scheduler.costs.block_bytes = BLOCK_BYTES
    return rig


def close(rig: rig_module.Rig) -> None:
    rig.scheduler.close()  # type: ignore[attr-defined]


def different_steps(path: Path) -> list[int]:
    trace = read_trace(path)
    steps = list(replay(trace))
    assert len(steps) == len(trace.steps) > 0
    return [step.record.number for step in steps if not step.same]


@pytest.mark.parametrize("first", range(0, 48, 8))
def test_whatever_happened_happens_again(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, beams, preemption, failed rows, aborts, resets and steps in flight, in tight pools."""
    path = tmp_path / "trace.json"
    traced: list[TracingScheduler] = []

    def make(config: SchedulerConfig) -> Scheduler:
        traced.append(TracingScheduler(config, str(path)))
        return traced[-1]

    monkeypatch.setattr(rig_module, "Scheduler", make)
    for seed in range(first, first + 8):
        run_trace(random.Random(seed), failures=seed % 8 // 4)
        traced[-1].close()
        assert different_steps(path) == []


def test_another_schedule_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setattr(rig_module, "Scheduler", lambda config: TracingScheduler(config, str(path)))
    rig = rig_module.Rig(max_num_batched_tokens=16)
    for i in range(4):
        rig.add(f"r{i}", rig_module.prompt_of(10, first=9 * i), max_tokens=6)
    rig.run()
    rig.scheduler.close()  # type: ignore[attr-defined]
    trace = read_trace(path)
    assert all(step.same for step in replay(trace))
    trace.config["max_num_batched_tokens"] = 12
    assert not all(step.same for step in replay(trace))


@pytest.mark.parametrize("num_given", [0, 3])
def test_a_fork_goes_on_into_a_known_block(
    num_given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent ends within that block: its own blocks do not say what it held of it."""
    path = tmp_path / "trace.json"
    rig = traced_rig(path, monkeypatch, block_size=8)
    prompt = rig_module.prompt_of(3)
    rig.add("alike", prompt, max_tokens=16)
    rig.run()
    parent = rig.add("parent", prompt, max_tokens=num_given + 1)
    rig.step_until(lambda: parent.num_output_tokens == num_given)
    rig.fork("parent", "child", prompt, output_token_ids=parent.output_token_ids, max_tokens=16)
    rig.run()
    close(rig)
    assert different_steps(path) == []


def test_forks_of_a_fork_and_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known blocks begin alike that nobody knew to when the first of them came."""
    path = tmp_path / "trace.json"
    rig = traced_rig(path, monkeypatch, block_size=8)
    prompt = rig_module.prompt_of(3)
    for name, seed in (("a", 1), ("b", 2)):
        rig.add(name, prompt, seed=seed, max_tokens=16)
    rig.run()
    rig.add("parent", prompt, max_tokens=1)
    for seed in (0, 1, 2):
        rig.fork("parent", f"child{seed}", prompt, seed=seed, max_tokens=16)
    rig.step_until(lambda: rig.requests["child1"].num_output_tokens == 2)
    given = rig.requests["child1"].output_token_ids
    rig.fork("child1", "grandchild", prompt, output_token_ids=given, max_tokens=16)
    rig.run()
    close(rig)
    assert different_steps(path) == []


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_stop_token_at_the_end_of_a_known_block(
    goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step in flight behind it, its block is cached: the next turn of a chat begins with it."""
    path = tmp_path / "trace.json"
    rig = traced_rig(path, monkeypatch)
    prompt = rig_module.prompt_of(3)
    stop = expected_output(prompt, 0, 1)
    if goes_on:  # the same token ends nothing here
        rig.add("on", prompt, max_tokens=6)
        rig.run()
        rig.scheduler.reset_prefix_cache()
    rig.add("turn", prompt, max_tokens=6, eos_token_ids=frozenset(stop))
    batches = [rig.scheduler.schedule(), rig.scheduler.schedule()]
    for batch in batches:
        rig.apply(rig.scheduler.update(batch, rig.runner.execute(batch).result()))
    assert rig.ends["turn"][0] == "stop"
    rig.add("next", [*prompt, *stop, 5, 6], max_tokens=4)
    rig.step()
    assert [work.start for work in rig.batch.requests] == [4]
    rig.run()
    close(rig)
    assert different_steps(path) == []


def test_unlike_requests_that_had_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They began alike and drew different tokens, so that neither finds the other's when they start again."""
    path = tmp_path / "trace.json"
    rig = traced_rig(path, monkeypatch)
    for seed in (1, 2):
        rig.add(f"r{seed}", rig_module.prompt_of(4), seed=seed, max_tokens=20)
    rig.step_until(lambda: rig.requests["r2"].num_output_tokens == 6)
    assert rig.outputs["r1"] != rig.outputs["r2"]
    rig.scheduler.recover([])
    rig.step()
    close(rig)
    assert different_steps(path) == []


def test_what_a_swap_costs_is_by_the_size_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not wait for blocks that take long to come back."""
    path = tmp_path / "trace.json"
    rig = traced_rig(
        path,
        monkeypatch,
        max_num_seqs=2,
        num_cpu_blocks=16,
        scheduling_policy="priority",
        preemption_mode="swap",
    )
    rig.add("busy", rig_module.prompt_of(6, first=20), max_tokens=16)
    rig.add("patient", rig_module.prompt_of(6), priority=1, max_tokens=8)
    rig.step()
    rig.add("urgent", rig_module.prompt_of(6, first=9), max_tokens=2)
    rig.run()
    assert rig.num_preemptions == 1
    close(rig)
    trace = read_trace(path)
    assert any(step.swapping_in for step in trace.steps)
    assert different_steps(path) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_of_the_engine(overlap: bool, tiny_llama: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    config = EngineConfig(
        model=tiny_llama.path,
        trace=str(path),
        async_scheduling=overlap,
        block_size=8,
        max_model_len=96,
        swap_space=0.001,
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=24,
    )
    engine = LLMEngine(config)
    shared = "The same beginning, long enough for some blocks. "
    for i in range(6):
        engine.add_request(f"r{i}", shared + "and " * i, GREEDY)
    engine.add_request("choices", "Once upon", SamplingParams(n=3, max_tokens=9, seed=1, temperature=1.0))
    engine.add_request("stops", shared, SamplingParams(temperature=0.0, max_tokens=20, stop=["e", "a"]))
    for _ in range(4):
        engine.step()
    engine.abort_request("r5")
    engine.add_beam_search("beams", "A b", BeamSearchParams(beam_width=2, max_tokens=5))
    engine.reset_prefix_cache()
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("again", shared, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    assert different_steps(path) == []


def test_a_closed_engine_has_written_everything(tiny_llama: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=64, trace=str(path)) as llm:
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    trace = read_trace(path)
    assert [ends[0].num_output_tokens for ends in trace.ended.values()] == [12, 12]
    assert trace.engine["device"] == "cpu"
    assert trace.engine["architecture"] == "LlamaForCausalLM"


def test_without_a_trace_there_is_nothing_of_it(tiny_llama: TinyModel) -> None:
    """Not a line of pagedinfer.tracing runs in a step."""
    folder = str(Path(tracing.__file__).parent)
    ran: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=64) as llm:
        assert type(llm.llm_engine.scheduler) is Scheduler
        sys.setprofile(watch)
        try:
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        finally:
            sys.setprofile(None)
    assert any(name.endswith("scheduler.py") for name in ran)
    assert not [name for name in ran if name.startswith(folder)]
