"""Steps that are launched just in time: the device stays busy, and whoever comes is in the very next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedinfer import LLMEngine, RequestOutput, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.batch import Batch, StepHandle, StepOutput
from pagedinfer.engine.launch_timing import LaunchTiming
from tests.conftest import TinyModel
from tests.models.parity import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

MILLISECOND = 1e-3
LAUNCH = 0.6 * MILLISECOND  # of the host, for each step
UPDATE = 1.5 * MILLISECOND


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Device:
    """Computes one step after another, each as long as `duration` says."""

    def __init__(self, engine: LLMEngine, clock: Clock) -> None:
        self.clock = clock
        self.duration: Callable[[Batch], float] = lambda batch: 8 * MILLISECOND
        self.batches: list[Batch] = []
        self.idle: list[float] = []  # seconds before each step
        self.lead: list[float] = []  # seconds from its launch to its begin
        self._free_at = clock.now
        self._execute = engine.worker.execute

    def execute(self, batch: Batch) -> StepHandle:
        handle = self._execute(batch)
        self.clock.now += LAUNCH
        begin = max(self.clock.now, self._free_at)
        self.batches.append(batch)
        self.idle.append(begin - self._free_at)
        self.lead.append(begin - self.clock.now)
        self._free_at = begin + self.duration(batch)
        return Result(handle, self.clock, self._free_at)


class Result:
    def __init__(self, handle: StepHandle, clock: Clock, ready_at: float) -> None:
        self._handle, self._clock, self._ready_at = handle, clock, ready_at

    def result(self) -> StepOutput:
        self._clock.now = max(self._clock.now, self._ready_at)
        return self._handle.result()


@pytest.fixture
def engine(tiny_llama: TinyModel) -> Iterator[LLMEngine]:
    config = EngineConfig(
        model=tiny_llama.path,
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        scheduling_policy="priority",
    )
    engine = LLMEngine(config)
    engine._timing, engine._max_launched = LaunchTiming(), 2  # as with a GPU
    yield engine
    engine.close()


@pytest.fixture
def device(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> Device:
    clock = Clock()
    for module in ("engine", "launched_steps", "launch_timing"):
        monkeypatch.setattr(f"pagedinfer.engine.{module}.time", clock)
    device = Device(engine, clock)
    update = engine.scheduler.update

    def updated(*arguments: Any) -> Any:
        clock.now += UPDATE
        return update(*arguments)

    monkeypatch.setattr(engine.worker, "execute", device.execute)
    monkeypatch.setattr(engine.scheduler, "update", updated)
    return device


def add(engine: LLMEngine, name: str, max_tokens: int, priority: int = 1) -> None:
    [prompt] = random_prompts((9,), seed=len(name))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": prompt}, params, priority)


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def test_the_device_is_busy_and_the_launch_is_late(engine: LLMEngine, device: Device) -> None:
    for name in ("a", "bb", "ccc"):
        add(engine, name, 40)
    run(engine)
    assert max(device.idle[5:]) == 0.0
    assert max(device.lead[5:]) < 0.8 * MILLISECOND


def test_whoever_comes_before_the_launch_is_in_the_step(engine: LLMEngine, device: Device) -> None:
    for name in ("a", "bb", "ccc", "dddd"):
        add(engine, name, 60)
    num_checked = 0
    while len(device.batches) < 40:
        waited = not engine.step() and len(device.batches) > 8
        if waited and len(device.batches) % 5 == 0:
            name, before = f"urgent {num_checked}", len(device.batches)
            arrived = device.clock.now
            add(engine, name, 1, priority=0)
            while not any(output.request_id == name for output in engine.step()):
                pass
            assert name in [request.request_id for request in device.batches[before].requests]
            # The rest of the step that ran, and its own; the host's part of neither.
            assert device.clock.now - arrived < (8 + 2 + 1) * MILLISECOND
            num_checked += 1
    assert num_checked >= 4


def test_steps_that_are_shorter_or_longer_than_expected(engine: LLMEngine, device: Device) -> None:
    device.duration = lambda batch: (4 if 20 < batch.step <= 60 else 8) * MILLISECOND
    for name in ("a", "bb", "ccc"):
        add(engine, name, 100)
    run(engine)
    for steps in (slice(8, 20), slice(48, 60), slice(72, 100)):
        assert sum(device.idle[steps]) < 0.05 * MILLISECOND * (steps.stop - steps.start)
        assert max(device.lead[steps]) < 4.5 * MILLISECOND


def test_the_outputs_are_the_same(engine: LLMEngine, tiny_llama: TinyModel, device: Device) -> None:
    names = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
    for i, name in enumerate(names):
        add(engine, name, 5 + 4 * i, priority=i % 3)
    found = run(engine)
    for i, name in enumerate(names):
        add(engine, name, 5 + 4 * i)
        engine._timing, engine._max_launched = None, 1
        [alone] = run(engine).values()
        assert found[name].outputs[0].token_ids == alone.outputs[0].token_ids
