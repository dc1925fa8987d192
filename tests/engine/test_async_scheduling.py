"""Steps that are launched before the results of the one before are known: nobody can tell by the outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from pagedinfer import LLM, BeamSearchParams, LLMEngine, RequestOutput, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.input_processor import TokensPrompt
from pagedinfer.sampling_params import RequestOutputKind
from tests.conftest import TinyModel
from tests.engine.run_engine import run
from tests.models.parity import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts((3, 17, 33, 5, 64, 9), seed=21)
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def make_engine(path: str, device: str, **changes: Any) -> LLMEngine:
    options = OPTIONS | {"device": device, "async_scheduling": True} | changes
    return LLMEngine(EngineConfig(model=path, **options))


@pytest.fixture(scope="module", params=DEVICES)
def engines(tiny_llama: TinyModel, request: pytest.FixtureRequest) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """One that overlaps its steps, and one that does not."""
    overlapped, plain = (
        make_engine(tiny_llama.path, request.param, async_scheduling=on) for on in (True, False)
    )
    yield overlapped, plain
    overlapped.close()
    plain.close()


@pytest.fixture
def engine(engines: tuple[LLMEngine, LLMEngine]) -> LLMEngine:
    """The one that overlaps."""
    engines[0].reset_prefix_cache()
    return engines[0]


def prompt(index: int) -> TokensPrompt:
    return {"prompt_token_ids": PROMPTS[index]}


def generate(engine: LLMEngine, params: list[SamplingParams]) -> list[RequestOutput]:
    engine.reset_prefix_cache()
    for index, each in enumerate(params):
        engine.add_request(str(index), prompt(index % len(PROMPTS)), each)
    outputs = run(engine)
    return [outputs[str(index)] for index in range(len(params))]


def choices_of(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [
        (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)
        for output in outputs
        for choice in output.outputs
    ]


def record(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to each step: "launch 3", "result 3"."""
    events: list[str] = []
    execute = engine.worker.execute

    class Handle:
        def __init__(self, step: int, inner: Any) -> None:
            self.step, self.inner = step, inner

        def result(self) -> Any:
            events.append(f"result {self.step}")
            return self.inner.result()

    def recorded(batch: Any) -> Any:
        events.append(f"launch {batch.step - first}")
        return Handle(batch.step - first, execute(batch))

    first = engine.scheduler._step + 1
    monkeypatch.setattr(engine.worker, "execute", recorded)
    return events


def test_the_next_step_is_launched_before_a_result_is_awaited(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record(engine, monkeypatch)
    engine.add_request("a", prompt(0), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    run(engine)
    assert events == [
        *("launch 0", "launch 1", "result 0", "launch 2", "result 1", "launch 3", "result 2", "result 3")
    ]


def test_a_length_is_met_without_a_token_too_many(engine: LLMEngine) -> None:
    before = engine.scheduler.counters.num_scheduled_tokens
    outputs = generate(engine, [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (1, 2, 7)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 7]
    num_prompt_tokens = sum(map(len, PROMPTS[:3]))
    assert engine.scheduler.counters.num_scheduled_tokens - before == num_prompt_tokens + 0 + 1 + 6


def test_whatever_ends_requests_ends_them_at_the_same_token(engines: tuple[LLMEngine, LLMEngine]) -> None:
    """Stop tokens, stop strings, lengths and min_tokens, on penalised, biased and seeded samples."""
    full = generate(engines[1], [GREEDY] * 6)
    tokens = [output.outputs[0].token_ids for output in full]
    text = full[3].outputs[0].text
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[tokens[0][5]]),
        SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=tokens[1][:3], min_tokens=5),
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=[text[len(text) // 2 :][:2]]),
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9, logit_bias={7: 5.0}),
        SamplingParams(temperature=0.0, max_tokens=12, bad_words=["a", "the end"], ignore_eos=True),
    ]
    found, wanted = (choices_of(generate(engine, params)) for engine in engines)
    assert found == wanted
    assert {reason for _, _, reason, _ in found} == {"stop", "length"}


def test_log_probabilities_are_the_same(engines: tuple[LLMEngine, LLMEngine]) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)] * 5
    for output, other in zip(*(generate(engine, params) for engine in engines), strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        for found, wanted in (
            (output.outputs[0].logprobs, other.outputs[0].logprobs),
            (output.prompt_logprobs, other.prompt_logprobs),
        ):
            assert found is not None
            assert wanted is not None
            assert len(found) == len(wanted)
            for one, another in zip(found, wanted, strict=True):
                if one is None or another is None:
                    assert one is another is None
                    continue
                assert one.keys() == another.keys()
                for token, logprob in one.items():
                    assert logprob.logprob == pytest.approx(another[token].logprob, abs=1e-4)
                    assert logprob.rank == another[token].rank


def test_a_stop_costs_one_token_and_frees_all(engine: LLMEngine) -> None:
    (full,) = generate(engine, [GREEDY])
    stop = full.outputs[0].token_ids[6]
    length = full.outputs[0].token_ids.index(stop) + 1
    before = engine.scheduler.counters.num_scheduled_tokens
    (output,) = generate(engine, [SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop])])
    assert output.outputs[0].token_ids == full.outputs[0].token_ids[:length]
    assert engine.scheduler.counters.num_scheduled_tokens - before == len(PROMPTS[0]) + length
    # The slot and the blocks of the step that came too late are the next one's at once.
    assert choices_of(generate(engine, [GREEDY])) == choices_of([full])


@pytest.mark.parametrize("device", DEVICES)
def test_random_arrivals_and_aborts(device: str, tiny_llama: TinyModel) -> None:
    """Two slots, a pool for one and a half: whatever comes in between, each gets what it gets alone."""
    draw = random.Random(5)
    small = {"num_gpu_blocks_override": 8, "max_model_len": 96, "max_num_seqs": 2}
    engine = make_engine(tiny_llama.path, device, **small)
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=draw.randint(1, 24), ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    wanted = generate(engine, params)
    finished: dict[str, RequestOutput] = {}
    added: set[str] = set()
    for number in range(60):
        name = f"{number}"
        engine.add_request(name, prompt(number % 6), params[number % 6])
        added.add(name)
        for _ in range(draw.randint(0, 6)):
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        name = f"{draw.randint(0, number)}"
        if draw.random() < 0.4 and name in added - finished.keys():
            output = engine.abort_request(name)
            assert output is not None
            finished[name] = output
    finished |= {name: output for name, output in run(engine).items() if output.finished}
    assert finished.keys() == added
    for name, output in finished.items():
        tokens, other = output.outputs[0].token_ids, wanted[int(name) % 6].outputs[0].token_ids
        assert tokens == (other[: len(tokens)] if output.outputs[0].finish_reason == "abort" else other)
    engine.close()


def test_a_prompt_of_an_aborted_request_is_not_taken_for_that_of_its_namesake(engine: LLMEngine) -> None:
    rated = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    (wanted,) = generate(engine, [rated])
    engine.add_request("first", prompt(1), GREEDY)
    engine.step()
    engine.add_request("a", prompt(4), rated)
    engine.step()  # has launched the step that computes its prompt
    engine.abort_request("a")
    engine.add_request("a", prompt(0), rated)
    assert run(engine)["a"].prompt_logprobs == wanted.prompt_logprobs


def test_logits_processors_see_every_token_and_none_beyond_the_end(engine: LLMEngine) -> None:
    seen: list[list[int]] = []

    def processor(output: list[int], logits: Tensor) -> Tensor:
        seen.append(output.copy())
        return logits

    (full,) = generate(engine, [GREEDY])
    tokens = full.outputs[0].token_ids
    stop = tokens[7]
    length = tokens.index(stop) + 1
    params = SamplingParams(
        temperature=0.0, max_tokens=20, stop_token_ids=[stop], logits_processors=[processor]
    )
    outputs = generate(engine, [params, GREEDY])
    assert outputs[0].outputs[0].token_ids == tokens[:length]
    assert seen == [tokens[:n] for n in range(length)]


def test_a_beam_search_computes_nothing_in_vain(engines: tuple[LLMEngine, LLMEngine]) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    found = []
    for engine in engines:
        engine.reset_prefix_cache()
        before = engine.scheduler.counters.num_scheduled_tokens
        engine.add_beam_search("beams", prompt(2), params)
        engine.add_request("other", prompt(1), GREEDY)
        outputs = run(engine)
        found.append([(each.token_ids, each.finish_reason) for each in outputs["beams"].outputs])
        num_tokens = engine.scheduler.counters.num_scheduled_tokens - before
        assert num_tokens == len(PROMPTS[2]) + 3 * 7 + len(PROMPTS[1]) + 19
    assert found[0] == found[1]


def test_a_request_that_nobody_watches_gives_all_at_its_end_whatever_that_is(
    engines: tuple[LLMEngine, LLMEngine],
) -> None:
    wanted = generate(engines[1], [GREEDY] * 2)
    stop = wanted[1].outputs[0].token_ids[9]
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop])]
    seen = generate(engines[1], params)
    for engine in engines:
        engine.reset_prefix_cache()
        for index, each in enumerate(params):
            kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(str(index), prompt(index), each, output_kind=kind)
        engine.add_request("aborted", prompt(0), GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
        for _ in range(5):
            assert engine.step() == []
        aborted = engine.abort_request("aborted")
        outputs = run(engine)
        for index, other in enumerate(seen):
            choice, output = outputs[str(index)].outputs[0], outputs[str(index)]
            assert choices_of([output]) == choices_of([other])
            assert choice.cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)
            assert output.metrics.num_generation_tokens == len(choice.token_ids)
            assert output.metrics.scheduled_ts <= output.metrics.first_token_ts
            assert output.metrics.first_token_ts < output.metrics.last_token_ts
        assert aborted is not None
        assert aborted.outputs[0].token_ids == wanted[0].outputs[0].token_ids[:5]


def test_pieces_of_a_stream_add_up(engine: LLMEngine) -> None:
    wanted = generate(engine, [GREEDY] * 3)
    tokens: dict[str, list[int]] = {}
    for index in range(3):
        engine.add_request(str(index), prompt(index), GREEDY, output_kind=RequestOutputKind.DELTA)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    assert [tokens[str(index)] for index in range(3)] == [each.outputs[0].token_ids for each in wanted]


def test_a_result_that_fails_leaves_a_usable_engine(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = choices_of(generate(engine, [GREEDY] * 3))
    execute = engine.worker.execute
    count = 0

    class Failing:
        def result(self) -> Any:
            raise RuntimeError("the device is on fire")

    def fails_once(batch: Any) -> Any:
        nonlocal count
        count += 1
        handle = execute(batch)
        return Failing() if count == 3 else handle

    monkeypatch.setattr(engine.worker, "execute", fails_once)
    engine.add_request("a", prompt(0), GREEDY)
    with pytest.raises(RuntimeError, match="on fire"):
        run(engine)
    monkeypatch.undo()
    assert not engine.has_unfinished_requests()
    assert choices_of(generate(engine, [GREEDY] * 3)) == wanted


def test_it_is_a_choice(tiny_llama: TinyModel) -> None:
    """On a CPU, which computes in the thread that schedules, it gains nothing, and is off by default."""
    for choice, most in ((None, 1), (False, 1), (True, 2)):
        with LLM(tiny_llama.path, **OPTIONS, device="cpu", async_scheduling=choice) as llm:
            assert llm.llm_engine._max_launched == most
    with pytest.raises(ValueError, match="async_scheduling must be True or False, got 1"):
        LLM(tiny_llama.path, **OPTIONS, async_scheduling=1)  # type: ignore[arg-type]
