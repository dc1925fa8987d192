"""A step that raises ends the requests in it; all others go on, and get the same tokens as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedinfer import LLM, BeamSearchParams, LLMEngine, RequestOutput, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.batch import Batch, StepHandle, StepOutput
from pagedinfer.sampling_params import RequestOutputKind
from tests.conftest import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
PROMPTS = {name: {"prompt_token_ids": [3 + i + 5 * j for j in range(18)]} for i, name in enumerate("abcd")}


class FailingHandle:
    def __init__(self, handle: StepHandle) -> None:
        self.handle = handle

    def result(self) -> StepOutput:
        self.handle.result()
        raise RuntimeError("the result of a step")


class FailingWorker:
    """An engine's worker, whose steps fail when `fails` says so, in one of three places."""

    def __init__(self, engine: LLMEngine, place: str, fails: Callable[[Batch], bool]) -> None:
        self.place, self.fails = place, fails
        self._execute = engine.worker.execute
        self.num_failed = 0
        engine.worker.execute = self.execute  # type: ignore[assignment, method-assign]

    def execute(self, batch: Batch) -> StepHandle:
        if not self.fails(batch):
            return self._execute(batch)
        self.num_failed += 1
        if self.place == "before":
            raise RuntimeError("before anything has run")
        handle = self._execute(batch)
        if self.place == "after":
            raise RuntimeError("after all has run")
        return FailingHandle(handle)


OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 2, "swap_space": 0.01}
OVERLAPPED: dict[str, Any] = {"device": "cpu", "async_scheduling": True}


def make_engine(model: str, how: dict[str, Any], **changes: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(model=model, dtype="float32", **OPTIONS | how | changes))


@pytest.fixture(
    params=[
        pytest.param({"device": "cpu", "async_scheduling": False}, id="one by one"),
        pytest.param(OVERLAPPED, id="overlapped"),
        pytest.param({"device": "cuda", "async_scheduling": True}, id="on a GPU", marks=pytest.mark.gpu),
    ]
)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


@pytest.fixture
def engine(tiny_llama: TinyModel, how: dict[str, Any]) -> Iterator[LLMEngine]:
    engine = make_engine(tiny_llama.path, how)
    yield engine
    assert engine.scheduler.kv.num_free == 64
    engine.close()


@pytest.fixture(scope="module")
def solo(tiny_llama: TinyModel) -> dict[str, list[int]]:
    """What each prompt gets when nothing fails."""
    engine = make_engine(tiny_llama.path, OVERLAPPED)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, SAMPLED)
    ends = run(engine)[0]
    engine.close()
    return {name: output.outputs[0].token_ids for name, output in ends.items()}


def run(engine: LLMEngine) -> tuple[dict[str, RequestOutput], list[list[str]]]:
    """The last outputs, and which requests each failed step has ended."""
    ends: dict[str, RequestOutput] = {}
    failures = []
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except RuntimeError:
            failures.append(sorted(engine.failed_request_ids))
        else:
            ends |= {output.request_id: output for output in outputs if output.finished}
    return ends, failures


def once(number: int) -> Callable[[Batch], bool]:
    """Whether it is the step of this number, from 1."""
    count = iter(range(1, 10_000))
    return lambda batch: next(count) == number


@pytest.mark.parametrize("place", ["before", "after", "result"])
@pytest.mark.parametrize("number", [1, 2, 8])
def test_those_that_wait_are_served(
    engine: LLMEngine, solo: dict[str, list[int]], place: str, number: int
) -> None:
    worker = FailingWorker(engine, place, once(number))
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, SAMPLED)
    ends, failures = run(engine)
    assert worker.num_failed == 1
    assert failures == [["a", "b"]]
    assert {name: output.outputs[0].token_ids for name, output in ends.items()} == {
        name: solo[name] for name in "cd"
    }
    engine.add_request("a", PROMPTS["a"], SAMPLED)
    assert run(engine)[0]["a"].outputs[0].token_ids == solo["a"]


def test_the_error_is_the_original_one(engine: LLMEngine) -> None:
    def processor(token_ids: list[int], logits: Any) -> Any:
        raise KeyError("a user's own mistake")

    engine.add_request("a", "Hello", SamplingParams(logits_processors=[processor]))
    with pytest.raises(KeyError, match="own mistake") as raised:
        engine.step()
    assert raised.traceback[-1].name == "processor"
    assert engine.failed_request_ids == ["a"]
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("place", ["before", "after", "result"])
def test_whoever_ends_in_the_step_before_has_its_output(
    tiny_llama: TinyModel, solo: dict[str, list[int]], place: str
) -> None:
    """Overlapped, "a" gets its last token in step 8, while step 9 is launched with "b" and "c" in it."""
    engine = make_engine(tiny_llama.path, OVERLAPPED)
    FailingWorker(engine, place, lambda batch: "c" in [each.request_id for each in batch.admitted])
    for name in "abcd":
        params = SamplingParams(**{"temperature": 1.0, "seed": 5, "ignore_eos": True}, max_tokens=8)
        engine.add_request(name, PROMPTS[name], params if name != "b" else SAMPLED)
        if name == "a":
            engine.step()
    ends, failures = run(engine)
    assert failures == [["b", "c"]] or failures == [["c"]]
    assert ends["a"].outputs[0].token_ids == solo["a"]
    assert ends["d"].outputs[0].token_ids == solo["d"]
    engine.close()


def test_a_step_launched_after_the_failed_one_is_run_again(
    tiny_llama: TinyModel, solo: dict[str, list[int]]
) -> None:
    """It was launched before the other's result was known, and "b" is in it alone: "b" loses nothing."""
    engine = make_engine(tiny_llama.path, OVERLAPPED)
    worker = FailingWorker(
        engine, "result", lambda batch: len(batch.requests) == 1 and worker.num_failed == 0
    )
    engine.add_request("a", PROMPTS["a"], SAMPLED)
    launched: list[list[str]] = []
    execute = engine.worker.execute

    def add_between(batch: Batch) -> StepHandle:
        launched.append([each.request_id for each in batch.requests])
        handle = execute(batch)
        if len(launched) == 1:
            engine.add_request("b", PROMPTS["b"], SAMPLED)
        return handle

    engine.worker.execute = add_between  # type: ignore[assignment, method-assign]
    ends, failures = run(engine)
    assert launched[:3] == [["a"], ["a", "b"], ["b"]]
    assert failures == [["a"]]
    assert ends["b"].outputs[0].token_ids == solo["b"]
    assert ends["b"].metrics.num_preemptions == 1
    engine.close()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_preempted_request_goes_on_where_it_was(
    tiny_llama: TinyModel, how: dict[str, Any], mode: str, kind: RequestOutputKind
) -> None:
    """Its tokens are those of before and after the failure, none twice, whatever was shown by then."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logprobs=0)
    prompts = {name: {"prompt_token_ids": [7 + i] * 30} for i, name in enumerate("ab")}
    small = {"num_gpu_blocks_override": 6, "max_model_len": 96, "block_size": 16, "preemption_mode": mode}
    engine = make_engine(tiny_llama.path, how, **small)
    engine.scheduler.admission.fits_at_worst = lambda *_: True  # type: ignore[method-assign]
    engine.add_request("b", prompts["b"], params)
    wanted = run(engine)[0]["b"].outputs[0]
    FailingWorker(engine, "after", lambda batch: bool(engine.scheduler.waiting) and next(countdown) == 3)
    countdown = iter(range(100))
    for name in "ab":
        engine.add_request(name, prompts[name], params, output_kind=kind)
    tokens: list[int] = []
    logprobs: list[Any] = []
    failures = []
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                if output.request_id == "b":
                    choice = output.outputs[0]
                    is_delta = kind is RequestOutputKind.DELTA
                    tokens = tokens + choice.token_ids if is_delta else choice.token_ids
                    logprobs = logprobs + choice.logprobs if is_delta else choice.logprobs  # type: ignore[operator]
        except RuntimeError:
            failures.append(engine.failed_request_ids)
    assert failures == [["a"]]
    assert tokens == wanted.token_ids
    assert [each[token].logprob for each, token in zip(logprobs, tokens, strict=True)] == pytest.approx(
        [each[token].logprob for each, token in zip(wanted.logprobs or [], tokens, strict=True)], abs=1e-4
    )
    engine.close()


def test_a_request_fails_with_all_its_choices(engine: LLMEngine, solo: dict[str, list[int]]) -> None:
    """Three choices and two slots: those that were not in the step have nobody to have them any more."""
    FailingWorker(engine, "after", once(3))
    engine.add_request("many", PROMPTS["a"], SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True))
    engine.add_request("b", PROMPTS["b"], SAMPLED)
    engine.add_request("c", PROMPTS["c"], SAMPLED)
    ends, failures = run(engine)
    assert failures == [["b", "many"]]
    assert list(ends) == ["c"]
    assert ends["c"].outputs[0].token_ids == solo["c"]


def test_choices_that_wait_for_their_prompt_still_share_it(engine: LLMEngine) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    engine.add_request("many", PROMPTS["c"], params)
    wanted = [choice.token_ids for choice in run(engine)[0]["many"].outputs]
    FailingWorker(engine, "after", once(2))
    for name in "ab":
        engine.add_request(name, PROMPTS[name], SAMPLED)
    engine.add_request("many", PROMPTS["c"], params)
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    assert len(engine.scheduler.forks) == 2
    ends, _ = run(engine)
    assert [choice.token_ids for choice in ends["many"].outputs] == wanted


def test_beam_searches(engine: LLMEngine) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    engine.add_beam_search("later", PROMPTS["b"], params)
    wanted = [choice.token_ids for choice in run(engine)[0]["later"].outputs]
    FailingWorker(engine, "result", once(4))
    engine.add_beam_search("first", PROMPTS["a"], params)
    engine.add_beam_search("later", PROMPTS["b"], params)
    ends, failures = run(engine)
    assert failures == [["first"]]
    assert [choice.token_ids for choice in ends["later"].outputs] == wanted


def test_generate_raises_the_error_and_the_llm_goes_on(
    tiny_llama: TinyModel, how: dict[str, Any], solo: dict[str, list[int]]
) -> None:
    """It has nothing to return; whoever was in the queue besides is served by later calls."""
    with LLM(tiny_llama.path, dtype="float32", **OPTIONS | how) as llm:
        engine = llm.llm_engine
        engine.add_request("early", PROMPTS["c"], SamplingParams(max_tokens=3))
        FailingWorker(engine, "result", once(9))
        with pytest.raises(RuntimeError, match="the result of a step"):
            llm.generate([PROMPTS["a"], PROMPTS["b"]] * 3, SAMPLED, use_tqdm=False)
        assert not engine.has_unfinished_requests()
        assert engine.scheduler.kv.num_free == 64
        engine.add_request("late", PROMPTS["c"], SAMPLED)
        [output] = llm.generate(PROMPTS["a"], SAMPLED, use_tqdm=False)
        assert output.outputs[0].token_ids == solo["a"]


def test_every_step_fails(engine: LLMEngine) -> None:
    """It comes to an end: each failure takes some requests along."""
    FailingWorker(engine, "before", lambda batch: True)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, SAMPLED)
    ends, failures = run(engine)
    assert (ends, failures) == ({}, [["a", "b"], ["c", "d"]])


def test_a_scheduler_that_fails_takes_all_along(
    engine: LLMEngine, solo: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule() -> Batch:
        raise RuntimeError("no schedule")

    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, SAMPLED)
    engine.step()
    monkeypatch.setattr(engine.scheduler, "schedule", schedule)
    with pytest.raises(RuntimeError, match="no schedule"):
        engine.step()
    assert sorted(engine.failed_request_ids) == list("abcd")
    assert not engine.has_unfinished_requests()
    monkeypatch.undo()
    engine.add_request("a", PROMPTS["a"], SAMPLED)
    assert run(engine)[0]["a"].outputs[0].token_ids == solo["a"]


def test_an_output_that_cannot_be_made(engine: LLMEngine, solo: dict[str, list[int]]) -> None:
    """The step has run, and its tokens are taken in; nothing can be said of who has been shown what."""
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, SAMPLED)
    process = engine._outputs.process
    engine._outputs.process = lambda *_: process(None)  # type: ignore[arg-type, call-arg, method-assign]
    with pytest.raises(TypeError):
        engine.step()
    engine._outputs.process = process  # type: ignore[method-assign]
    assert sorted(engine.failed_request_ids) == ["a", "b"]
    ends, _ = run(engine)
    assert {name: ends[name].outputs[0].token_ids for name in ends} == {name: solo[name] for name in "cd"}
