"""Urgent prompts that run beside the steps under way: earlier, and with the same outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedinfer import LLMEngine, RequestOutput, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.batch import Batch
from pagedinfer.runner.worker import Worker
from tests.conftest import TinyModel
from tests.engine.run_engine import run
from tests.models.parity import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,  # few sizes of graphs
    "scheduling_policy": "priority",
    "swap_space": 0.01,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", params=DEVICES)
def engines(tiny_llama: TinyModel, request: pytest.FixtureRequest) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """One with a lane, and one that runs one step after another."""
    options = OPTIONS | {"model": tiny_llama.path, "device": request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "_wants_lane", True)  # as by default with a GPU
        engine = LLMEngine(EngineConfig(**options))
    engine._max_launched = 2
    if request.param == "cuda":
        delay_steps(engine)
    plain = LLMEngine(EngineConfig(async_scheduling=False, **options))
    assert plain.worker.urgent_lane is None
    yield engine, plain
    engine.close()
    plain.close()


def delay_steps(engine: LLMEngine) -> None:
    """Each step but those in the lane begins some milliseconds late, so that those overtake it."""
    execute = engine.worker.execute

    def delayed(batch: Batch) -> Any:
        torch.cuda._sleep(4_000_000)  # cycles
        return execute(batch)

    engine.worker.execute = delayed  # type: ignore[method-assign]


@pytest.fixture
def engine(engines: tuple[LLMEngine, LLMEngine]) -> LLMEngine:
    """The one with a lane."""
    engines[0].reset_prefix_cache()
    return engines[0]


@pytest.fixture
def plain(engines: tuple[LLMEngine, LLMEngine]) -> LLMEngine:
    return engines[1]


def record_urgent(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The steps in the lane from now on."""
    lane = engine.worker.urgent_lane
    assert lane is not None
    execute, batches = lane.execute, list[Batch]()

    def recorded(batch: Batch) -> Any:
        batches.append(batch)
        return execute(batch)

    monkeypatch.setattr(lane, "execute", recorded)
    return batches


def saturate(engine: LLMEngine, params: SamplingParams = GREEDY) -> None:
    """All slots taken, all prompts computed, and steps under way."""
    for i, prompt in enumerate(random_prompts((17, 33, 5, 20, 9), seed=3)):
        engine.add_request(f"batch {i}", {"prompt_token_ids": prompt}, params, priority=1)
    enough = engine.scheduler.counters.num_generated_tokens + 12
    while engine.scheduler.counters.num_generated_tokens < enough or not engine._launched:
        engine.step()


def run_steps(engine: LLMEngine, count: int) -> dict[str, RequestOutput]:
    """Until so many more have been launched; with a GPU a call may do nothing but wait."""
    outputs: dict[str, RequestOutput] = {}
    last = engine.scheduler.counters.num_steps + count
    while engine.scheduler.counters.num_steps < last and engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def tokens(output: RequestOutput) -> list[list[int]]:
    return [list(choice.token_ids) for choice in output.outputs]


def test_it_goes_ahead_of_the_steps_under_way(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    urgent = record_urgent(engine, monkeypatch)
    saturate(engine)
    [prompt] = random_prompts((21,), seed=8)
    launched = engine.scheduler.counters.num_steps
    engine.add_request("urgent", {"prompt_token_ids": prompt}, GREEDY, priority=0)
    first: list[RequestOutput] = []
    while not first:
        first = [output for output in engine.step() if output.request_id == "urgent"]
    assert engine.scheduler.counters.num_steps <= launched + 2  # its own, and at most one launched meanwhile
    assert [work.num_tokens for work in urgent[0].requests] == [21]
    assert len(urgent) == 1
    num_preemptions = engine.scheduler.counters.num_preemptions
    outputs = run(engine)
    assert len(outputs["urgent"].outputs[0].token_ids) == 30
    assert engine.scheduler.counters.num_preemptions == num_preemptions + 1  # its second token takes a slot


def test_one_token_displaces_nobody(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    urgent = record_urgent(engine, monkeypatch)
    num_preemptions = engine.scheduler.counters.num_preemptions
    saturate(engine)
    for i in range(5):
        [prompt] = random_prompts((9,), seed=i)
        params = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add_request(f"urgent {i}", {"prompt_token_ids": prompt}, params, priority=0)
        run_steps(engine, 2)
    run(engine)
    assert len(urgent) >= 2
    assert engine.scheduler.counters.num_preemptions - num_preemptions <= 5 - len(urgent)


VARIED = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=1, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, seed=5, top_k=40, top_p=0.9, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=6, presence_penalty=0.7, repetition_penalty=1.2, max_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=8, min_tokens=5, logit_bias={7: 4.0}),
    SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2),
]


@pytest.mark.parametrize("seed", range(4))
def test_the_outputs_are_the_same(
    engine: LLMEngine, plain: LLMEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random arrivals that share prefixes, too few blocks, aborts."""
    urgent = record_urgent(engine, monkeypatch)
    draw = random.Random(seed)
    shared = random_prompts((32,), seed=50)[0]
    prompts = [
        shared[: draw.choice([0, 16, 32])] + prompt
        for prompt in random_prompts([draw.randint(1, 40) for _ in range(30)], seed=60 + seed)
    ]
    params = [draw.choice(VARIED) for _ in prompts]
    found: dict[str, RequestOutput] = {}
    aborted = set()
    saturate(engine)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params[i], priority=draw.choice([-1, 0, 2]))
        found |= run_steps(engine, draw.randint(1, 4))
        if draw.random() < 0.15 and str(i) not in found and engine.abort_request(str(i)) is not None:
            aborted.add(str(i))
    found |= run(engine)
    assert urgent
    for i, prompt in enumerate(prompts):
        if str(i) not in aborted:
            plain.add_request(str(i), {"prompt_token_ids": prompt}, params[i])
    for name, alone in run(plain).items():
        assert tokens(found[name]) == tokens(alone), name


def test_a_step_under_way_writes_none_of_its_blocks(
    engine: LLMEngine, plain: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a request that has just been given up would be the first to be handed out."""
    urgent = record_urgent(engine, monkeypatch)
    saturate(engine)
    run_steps(engine, 1)  # which has just been launched
    given_up = engine.scheduler.requests["batch 1"]
    assert given_up.num_computed_tokens % engine.config.block_size  # its last block is not full
    block = given_up.block_ids[-1]
    assert engine.abort_request("batch 1") is not None
    [prompt] = random_prompts((35,), seed=77)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    engine.add_request("urgent", {"prompt_token_ids": prompt}, params, priority=0)
    found = run(engine)["urgent"].outputs[0]
    plain.add_request("urgent", {"prompt_token_ids": prompt}, params)
    alone = run(plain)["urgent"].outputs[0]
    assert found.token_ids == alone.token_ids
    assert found.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
    assert len(urgent) == 1
    assert block not in urgent[0].admitted[0].block_ids


def test_what_it_is_not_for(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    urgent = record_urgent(engine, monkeypatch)
    saturate(engine)
    long, short = random_prompts((300, 8), seed=2)
    requests = {
        "long": (long, GREEDY, 0),
        "as urgent": (short, GREEDY, 1),
        "prompt": (short, SamplingParams(max_tokens=2, prompt_logprobs=1), 0),
        "choices": (short, SamplingParams(max_tokens=2, n=2), 0),
        "processor": (short, SamplingParams(max_tokens=2, logits_processors=[lambda _, row: row]), 0),
    }
    for name, (prompt, params, priority) in requests.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params, priority)
        run_steps(engine, 3)
    run(engine)
    assert urgent == []


@pytest.mark.parametrize("place", ["launch", "result"])
def test_a_step_that_fails_ends_its_request_alone(
    engine: LLMEngine, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = engine.worker.urgent_lane
    assert lane is not None
    execute = lane.execute

    class Failing:
        is_ready = True

        def __init__(self, batch: Batch) -> None:
            self.handle = execute(batch)

        def result(self) -> Any:
            self.handle.result()
            raise RuntimeError("the step has failed")

    def failing(batch: Batch) -> Any:
        if place == "launch":
            raise RuntimeError("the step has failed")
        return Failing(batch)

    saturate(engine)
    monkeypatch.setattr(lane, "execute", failing)
    engine.add_request("urgent", {"prompt_token_ids": [5, 6, 7]}, GREEDY, priority=0)
    with pytest.raises(RuntimeError, match="the step has failed"):
        run(engine)
    assert engine.failed_request_ids == ["urgent"]
    monkeypatch.undo()
    engine.add_request("another", {"prompt_token_ids": [5, 6, 7]}, GREEDY, priority=0)
    outputs = run(engine)
    assert len(outputs["another"].outputs[0].token_ids) == 30
    assert all(len(outputs[f"batch {i}"].outputs[0].token_ids) == 30 for i in range(5))
