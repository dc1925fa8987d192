"""LLM with structured outputs: random models write valid JSON, whatever else is asked of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from pagedinfer import LLM, SamplingParams, StructuredOutputsParams
from pagedinfer.distributed.messages import BatchDecoder, BatchEncoder
from pagedinfer.engine.batch import AdmittedRequest, Batch
from tests.conftest import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tiny_llama: TinyModel) -> Iterator[LLM]:
    options: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    with LLM(tiny_llama.path, **options) as llm:
        yield llm


def params(structured: dict[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 48, "structured_outputs": structured} | fields)


def texts(llm: LLM, prompts: list[str], sampling: Any) -> list[str]:
    return [c.text for output in llm.generate(prompts, sampling, use_tqdm=False) for c in output.outputs]


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age"}
    assert value["name"] in ("ann", "bob")
    assert 0 <= value["age"] <= 199


def test_json_by_a_schema(llm: LLM) -> None:
    compact = {"json": SCHEMA, "disable_any_whitespace": True}
    for text in texts(llm, ["x", "y", "z"], params(compact, temperature=1.5, seed=1, n=3)):
        check(text)
    for text in texts(llm, ["x", "y"], params(compact, temperature=0.0)):
        check(text)


def test_other_forms(llm: LLM) -> None:
    [text] = texts(llm, ["x"], params({"regex": "[ab]{5}c"}))
    assert re.fullmatch("[ab]{5}c", text)
    [text] = texts(llm, ["x"], params({"choice": ["fox", "dog and cat"]}))
    assert text in ("fox", "dog and cat")
    [text] = texts(llm, ["x"], params({"grammar": 'start: "<" /[0-9]{1,9}/ ">"'}))
    assert re.fullmatch("<[0-9]{1,9}>", text)


def test_beside_others_and_under_pressure(tiny_llama: TinyModel, llm: LLM) -> None:
    """More requests than slots, preemption, chunks and penalties: each is what it is alone."""
    prompts = ["the fox " * i or "a" for i in range(8)]
    compact = {"json": SCHEMA, "disable_any_whitespace": True}
    sampling = [
        params(compact, seed=i, presence_penalty=0.5 * (i % 2))
        if i % 2
        else SamplingParams(seed=i, max_tokens=40)
        for i in range(8)
    ]
    alone = [texts(llm, [prompt], each)[0] for prompt, each in zip(prompts, sampling, strict=True)]
    for text in alone[1::2]:
        check(text)
    for mode in ("recompute", "swap"):
        options: dict[str, Any] = {"preemption_mode": mode, "swap_space": 0.001, "max_num_batched_tokens": 16}
        with LLM(
            tiny_llama.path, device="cpu", num_gpu_blocks_override=5, max_num_seqs=4, **options
        ) as small:
            assert texts(small, prompts, sampling) == alone
            assert small.get_metrics().counters.num_preemptions > 0
    with LLM(
        tiny_llama.path, device="cpu", num_gpu_blocks_override=64, max_num_seqs=4, async_scheduling=True
    ) as fast:
        assert texts(fast, prompts, sampling) == alone


def test_together_with_allowed_tokens_and_logprobs(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    allowed = [tokenizer.encode(c)[0] for c in "ab"] + [tokenizer.eos_token_id]
    sampling = params({"regex": "[a-z]{4}"}, allowed_token_ids=allowed, logprobs=2)
    [output] = llm.generate(["x"], sampling, use_tqdm=False)
    assert re.fullmatch("[ab]{4}", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].logprobs is not None


def test_eos_that_is_ignored_repeats(llm: LLM) -> None:
    [output] = llm.generate(
        ["x"], params({"choice": ["fox"]}, ignore_eos=True, max_tokens=12), use_tqdm=False
    )
    assert output.outputs[0].text == "fox"
    assert output.outputs[0].finish_reason == "length"


def test_a_wrong_grammar_stops_the_call_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="the grammar cannot be used"):
        llm.generate(["x"], params({"regex": "("}), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_parameters_as_a_class(llm: LLM) -> None:
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["dog"]))
    assert texts(llm, ["x"], sampling) == ["dog"]


def test_ranks_are_told_of_grammars() -> None:
    sampling = params({"choice": ["a", "b"]})
    admitted = AdmittedRequest("x", 0, [5], 1, [0], sampling, 7)
    batch = BatchDecoder().decode(BatchEncoder().encode(Batch(1, admitted=[admitted])))
    assert batch.admitted[0].sampling_params == sampling
