"""LLMEngine: requests come, are aborted, and give outputs step by step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedinfer import BeamSearchParams, LLMEngine, RequestOutput, RequestTooLargeError, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.sampling_params import RequestOutputKind
from tests.conftest import TinyModel
from tests.models.parity import transformers_logits

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def make_engine(path: str, **changes: Any) -> LLMEngine:
    options: dict[str, Any] = {
        "device": "cpu",
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
    }
    return LLMEngine(EngineConfig(model=path, **options | changes))


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "overlapped"])
def shared_engine(tiny_llama: TinyModel, request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    engine = make_engine(tiny_llama.path, async_scheduling=request.param)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: LLMEngine) -> Iterator[LLMEngine]:
    """One engine for all tests, which each leaves empty, every block free."""
    free = shared_engine.scheduler.kv.num_free
    yield shared_engine
    assert not shared_engine.has_unfinished_requests()
    assert shared_engine.scheduler.kv.num_free == free
    shared_engine.reset_prefix_cache()


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_outputs_accumulate_and_are_snapshots(engine: LLMEngine) -> None:
    engine.add_request("a", "Hello", GREEDY)
    outputs = run(engine)["a"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
    final = outputs[-1].outputs[0]
    for output in outputs:
        choice = output.outputs[0]
        assert choice.token_ids == final.token_ids[: len(choice.token_ids)]
        assert final.text.startswith(choice.text)
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert [output.outputs[0].finish_reason for output in outputs] == [None] * 5 + ["length"]


def test_the_kinds_of_output_say_the_same(engine: LLMEngine) -> None:
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "Hello", GREEDY, output_kind=kind)
    outputs = run(engine)
    final = outputs["CUMULATIVE"][-1].outputs[0]
    assert [output.finished for output in outputs["FINAL_ONLY"]] == [True]
    only = outputs["FINAL_ONLY"][0].outputs[0]
    assert (only.text, only.token_ids) == (final.text, final.token_ids)
    deltas = [output.outputs[0] for output in outputs["DELTA"]]
    assert [len(delta.token_ids) for delta in deltas] == [1] * 6
    assert "".join(delta.text for delta in deltas) == final.text
    assert [delta.token_ids[0] for delta in deltas] == final.token_ids


def test_a_request_that_comes_later_joins(engine: LLMEngine) -> None:
    engine.add_request("alone", "Something else", GREEDY)
    alone = run(engine)["alone"][-1].outputs[0].token_ids
    engine.add_request("first", "Hello", GREEDY)
    engine.step()
    engine.step()
    engine.add_request("second", "Something else", GREEDY)
    outputs = run(engine)
    assert outputs["second"][-1].outputs[0].token_ids == alone
    assert len(outputs["first"]) == 4


def test_nothing_to_do_gives_nothing(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_a_request_that_cannot_fit_raises(engine: LLMEngine) -> None:
    with pytest.raises(RequestTooLargeError, match=r"600 tokens.*max_model_len=512"):
        engine.add_request("a", {"prompt_token_ids": [5] * 600}, GREEDY)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "empty"),
        ({"prompt_token_ids": [320]}, GREEDY, "vocabulary, got 320"),
        ("a", SamplingParams(stop_token_ids=[400]), "stop_token_ids .*got 400"),
    ],
)
def test_malformed_requests_raise_and_leave_the_others_alone(
    engine: LLMEngine, prompt: Any, params: SamplingParams, message: str
) -> None:
    """vllm#54195: ids that do not exist must not reach the device."""
    engine.add_request("alone", "Hello", GREEDY)
    alone = run(engine)["alone"][-1].outputs[0].token_ids
    engine.add_request("a", "Hello", GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request("b", prompt, params)
    assert run(engine)["a"][-1].outputs[0].token_ids == alone


def test_an_id_in_use_is_refused_and_free_again_later(engine: LLMEngine) -> None:
    engine.add_request("a", "Hello", GREEDY)
    with pytest.raises(ValueError, match="'a' already"):
        engine.add_request("a", "Hello again", GREEDY)
    assert len(run(engine)["a"]) == 6
    engine.add_request("a", "Hello again", GREEDY)
    assert len(run(engine)["a"]) == 6


@pytest.mark.parametrize("ids", [("a#1", "a"), ("a", "a#1"), ("a", "a")])
def test_the_id_of_a_choice_is_in_use_too(engine: LLMEngine, ids: tuple[str, str]) -> None:
    two = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True)
    engine.add_request(ids[0], "Hello", two)
    with pytest.raises(ValueError, match=r"unfinished request 'a(#1)?' already"):
        engine.add_request(ids[1], "Hello", two)
    assert set(run(engine)) == {ids[0]}


def test_an_id_is_in_use_until_the_last_choice_has_ended(engine: LLMEngine) -> None:
    engine.add_request("a", "Hello", SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True))
    engine.step()
    assert not engine.stop_choice("a", 0)
    with pytest.raises(ValueError, match="unfinished request 'a' already"):
        engine.add_request("a", "Hello", GREEDY)
    assert len(run(engine)["a"][-1].outputs[1].token_ids) == 6


def test_searches_and_requests_have_different_ids(engine: LLMEngine) -> None:
    search = BeamSearchParams(beam_width=2, max_tokens=4)
    engine.add_request("a", "Hello", GREEDY)
    engine.add_request("b#beam3", "Hello", GREEDY)
    engine.add_beam_search("c#beam0", "Hello", search)
    for request_id in ("a", "b", "c#beam0"):
        with pytest.raises(ValueError, match="there is an unfinished request"):
            engine.add_beam_search(request_id, "Hello", search)
    for request_id in ("c#beam0", "c#beam0#beam2"):
        with pytest.raises(ValueError, match="there is an unfinished request"):
            engine.add_request(request_id, "Hello", GREEDY)
    assert set(run(engine)) == {"a", "b#beam3", "c#beam0"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": 5}, "request_id must be a string, got 5"),
        ({"request_id": "\ud800"}, r"request_id must be Unicode text, got '\\ud800'"),
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"priority": float("nan")}, "priority must be an integer, got nan"),
    ],
)
def test_a_malformed_id_or_priority(tiny_llama: TinyModel, fields: dict[str, Any], message: str) -> None:
    engine = make_engine(tiny_llama.path, scheduling_policy="priority")
    engine.add_request("a", "Hello", GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.add_request(**{"request_id": "b", "prompt": "Hello", "params": GREEDY} | fields)
    assert set(run(engine)) == {"a"}
    engine.close()


def test_aborting_in_any_state(engine: LLMEngine) -> None:
    engine.add_request("alone", "Hello", GREEDY)
    alone = run(engine)["alone"][-1].outputs[0].token_ids
    engine.add_request("decoding", "Hello", GREEDY)
    engine.step()
    engine.add_request("prefilling", {"prompt_token_ids": [7] * 100}, GREEDY)
    engine.step()
    engine.add_request("waiting", "Hello", GREEDY)
    for request_id, num_tokens in (("waiting", 0), ("prefilling", 0), ("decoding", 2)):
        output = engine.abort_request(request_id)
        assert output is not None
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        assert output.outputs[0].token_ids == alone[:num_tokens]
        assert engine.abort_request(request_id) is None
    assert engine.abort_request("never there") is None
    assert not engine.has_unfinished_requests()
    engine.add_request("next", "Hello", GREEDY)
    assert run(engine)["next"][-1].outputs[0].token_ids == alone


def test_logits_that_cannot_be_sampled_end_their_request_alone(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedinfer.models.llama import LlamaForCausalLM

    engine = make_engine(tiny_llama.path)
    engine.add_request("good", "Hello", GREEDY)
    engine.step()
    engine.add_request("bad", "Hello", GREEDY)
    compute = LlamaForCausalLM.compute_logits

    def poison(model: LlamaForCausalLM, hidden: Any) -> Any:
        logits = compute(model, hidden)
        logits[1].fill_(float("nan"))
        return logits

    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", poison)
    outputs: list[RequestOutput] = []
    while not any(output.request_id == "bad" for output in outputs):
        outputs = engine.step()
    bad = next(output for output in outputs if output.request_id == "bad")
    monkeypatch.undo()
    assert (bad.finished, bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == (True, "error", [])
    assert bad.error is not None
    assert "NaN" in bad.error
    assert run(engine)["good"][-1].outputs[0].finish_reason == "length"
    engine.close()


def test_a_closed_engine_says_so(tiny_llama: TinyModel) -> None:
    engine = make_engine(tiny_llama.path)
    engine.add_request("a", "Hello", GREEDY)
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    for use in (engine.step, lambda: engine.add_request("b", "Hello")):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_tokenizer_that_is_not_there(tiny_llama: TinyModel, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded from .*skip_tokenizer_init"):
        make_engine(tiny_llama.path, tokenizer=str(tmp_path))


def test_a_tokenizer_whose_config_transformers_refuses(tiny_llama: TinyModel, tmp_path: Any) -> None:
    """Its error for a field of the wrong type is no ValueError."""
    shutil.copytree(tiny_llama.path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": "zero"}))
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded from .*'pad_token_id'"):
        make_engine(str(tmp_path))


# ---- several choices of one prompt -----------------------------------------------------------------


def choices_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for choice in outputs[-1].outputs]


def sampled(n: int, **changes: Any) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 6, "ignore_eos": True}
    return SamplingParams(n=n, **options | changes)


def test_more_choices_than_slots_all_finish_and_share_the_prompt(engine: LLMEngine) -> None:
    """vllm#1101, vllm#6646: 9 choices through 2 slots, of a prompt of 19 tokens."""
    prompt = {"prompt_token_ids": [3 + 5 * i for i in range(19)]}
    before = engine.scheduler.counters.num_scheduled_tokens
    engine.add_request("a", prompt, sampled(9))
    outputs = run(engine)["a"]
    choices = choices_of(outputs)
    assert [len(choice) for choice in choices] == [6] * 9
    assert [choice.index for choice in outputs[-1].outputs] == list(range(9))
    assert len({tuple(choice) for choice in choices}) == 9
    computed = engine.scheduler.counters.num_scheduled_tokens - before
    assert computed < 9 * (19 + 5)
    # Each choice is what it would be in another company.
    engine.add_request("b", prompt, sampled(3))
    assert choices_of(run(engine)["b"]) == choices[:3]


def test_each_choice_has_the_logprobs_of_its_own_tokens(engine: LLMEngine, tiny_llama: TinyModel) -> None:
    prompt = [3 + 5 * i for i in range(19)]
    engine.add_request("a", {"prompt_token_ids": prompt}, sampled(4, logprobs=0))
    for choice in run(engine)["a"][-1].outputs:
        logits = transformers_logits(tiny_llama.reference, prompt + choice.token_ids)
        drawn = (
            logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None])
        )
        assert choice.cumulative_logprob == pytest.approx(drawn.sum().item(), abs=6e-4)


def test_greedy_choices_are_equal(engine: LLMEngine) -> None:
    engine.add_request("a", "Hello", sampled(3, temperature=0.0))
    first, *others = choices_of(run(engine)["a"])
    assert others == [first, first]


def test_the_kinds_of_output_with_several_choices(engine: LLMEngine) -> None:
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "Hello", sampled(3), output_kind=kind)
    outputs = run(engine)
    final = outputs["CUMULATIVE"][-1]
    assert final.finished
    assert not any(output.finished for output in outputs["CUMULATIVE"][:-1])
    assert [output.finished for output in outputs["FINAL_ONLY"]] == [True]
    assert choices_of(outputs["FINAL_ONLY"]) == choices_of(outputs["CUMULATIVE"])
    joined: list[list[int]] = [[], [], []]
    for output in outputs["DELTA"]:
        for choice in output.outputs:
            joined[choice.index] += choice.token_ids
    assert joined == choices_of(outputs["CUMULATIVE"])
    assert final.metrics.num_generation_tokens == 18


def test_choices_end_one_by_one(engine: LLMEngine) -> None:
    engine.add_request("full", "Hello", sampled(4))
    full = choices_of(run(engine)["full"])
    engine.add_request("a", "Hello", sampled(4, stop_token_ids=[full[2][1]]))
    outputs = run(engine)["a"]
    choice = outputs[-1].outputs[2]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", full[2][1])
    assert choice.token_ids == full[2][:2]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_aborting_ends_all_choices(engine: LLMEngine) -> None:
    for num_steps in range(5):
        engine.add_request("a", "Hello", sampled(4))
        for _ in range(num_steps):
            engine.step()
        output = engine.abort_request("a")
        assert output is not None
        assert output.finished
        assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 4
        assert not engine.has_unfinished_requests()
