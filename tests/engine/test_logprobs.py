"""Log-probabilities through the engine: of generated tokens and of prompts, against torch's log_softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedinfer import LLM, LLMEngine, Logprob, RequestOutput, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.sampling_params import RequestOutputKind
from tests.conftest import TinyModel
from tests.models.parity import random_prompts, transformers_logits

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 320
TOLERANCE = 1e-4
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 8,
    "max_logprobs": -1,
}
PROMPTS = random_prompts((1, 6, 40), seed=11)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def llm(request: pytest.FixtureRequest, tiny_llama: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_llama.path, **OPTIONS | {"device": request.param}) as llm:
        yield llm


def generate(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def expected_logprobs(model: TinyModel, token_ids: list[int]) -> Tensor:
    """[len(token_ids), vocabulary]: of the token after each."""
    return torch.log_softmax(transformers_logits(model.reference, token_ids), dim=-1)


def check_entry(entry: dict[int, Logprob], token: int, row: Tensor, num_top: int) -> None:
    """k entries, or k + 1 with the token, in the order of their ranks, which are the true ones."""
    count = VOCAB_SIZE if num_top == -1 else num_top
    ranks = [logprob.rank or 0 for logprob in entry.values()]
    assert ranks[:count] == list(range(1, count + 1))
    assert token in entry
    assert len(entry) == count + (max(ranks) > count)
    values = [logprob.logprob for logprob in entry.values()]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(row[list(entry)].tolist(), abs=TOLERANCE)
    for token_id, rank in zip(entry, ranks, strict=True):
        certain = int((row > row[token_id] + TOLERANCE).sum())
        assert certain < rank <= int((row >= row[token_id] - TOLERANCE).sum())


@pytest.mark.parametrize("num_top", [0, 2, VOCAB_SIZE, -1])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.5])
def test_they_are_of_the_models_distribution(
    num_top: int, temperature: float, llm: LLM, tiny_llama: TinyModel
) -> None:
    """vllm PR#36746, vllm#9453, sglang PR#40099: whatever temperature, filters and penalties do."""
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=6, ignore_eos=True, logprobs=num_top, presence_penalty=1.0
    )
    ranks = set()
    for prompt, output in zip(PROMPTS, generate(llm, PROMPTS, params), strict=True):
        choice = output.outputs[0]
        assert choice.logprobs is not None
        rows = expected_logprobs(tiny_llama, prompt + choice.token_ids)[len(prompt) - 1 :]
        total = 0.0
        for token, entry, row in zip(choice.token_ids, choice.logprobs, rows[:-1], strict=True):
            check_entry(entry, token, row, num_top)
            total += entry[token].logprob
            ranks.add(entry[token].rank)
            assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
        assert choice.cumulative_logprob == pytest.approx(total, abs=1e-4)
    assert temperature < 1 or max(ranks) > 5


def test_each_request_gets_as_many_as_it_asked_for(llm: LLM) -> None:
    wanted = [None, 0, 5, None, 1]
    params = [SamplingParams(temperature=0.0, max_tokens=4, logprobs=k) for k in wanted]
    for k, output in zip(wanted, generate(llm, [PROMPTS[1]] * 5, params), strict=True):
        logprobs = output.outputs[0].logprobs
        if k is None:
            assert logprobs is None
        else:
            assert logprobs is not None
            assert [len(entry) for entry in logprobs] == [max(k, 1)] * 4


def test_more_than_the_limit_is_refused(llm: LLM, tiny_llama: TinyModel) -> None:
    with pytest.raises(ValueError, match=r"logprobs must be at most 320 \(max_logprobs\), got 321"):
        llm.generate("Hello", SamplingParams(logprobs=VOCAB_SIZE + 1), use_tqdm=False)
    with LLM(tiny_llama.path, **OPTIONS | {"max_logprobs": 20}) as limited:
        for name in ("logprobs", "prompt_logprobs"):
            for value in (21, -1):
                with pytest.raises(ValueError, match=f"{name} must be at most 20"):
                    limited.generate("Hello", SamplingParams(**{name: value}), use_tqdm=False)


def test_they_come_with_their_tokens(tiny_llama: TinyModel) -> None:
    engine = LLMEngine(EngineConfig(model=tiny_llama.path, **OPTIONS))
    try:
        for kind in RequestOutputKind:
            params = SamplingParams(
                temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1, output_kind=kind
            )
            engine.add_request(kind.name, "Hello", params)
        outputs: dict[str, list[RequestOutput]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
    finally:
        engine.close()
    final = outputs["FINAL_ONLY"][-1]
    for output in outputs["CUMULATIVE"]:
        choice = output.outputs[0]
        assert choice.logprobs == (final.outputs[0].logprobs or [])[: len(choice.token_ids)]
        assert output.prompt_logprobs == final.prompt_logprobs
    deltas = [output.outputs[0].logprobs or [] for output in outputs["DELTA"]]
    assert [len(delta) for delta in deltas] == [1] * 5
    assert [entry for delta in deltas for entry in delta] == final.outputs[0].logprobs
    assert [o.prompt_logprobs is not None for o in outputs["DELTA"]] == [True] + [False] * 4


# ---- of prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 16}, {"max_num_batched_tokens": 1}, {"enable_prefix_caching": False}],
    ids=["at once", "chunks of 16", "chunks of 1", "no prefix cache"],
)
def test_of_prompts(changes: dict[str, Any], tiny_llama: TinyModel) -> None:
    """Twice, so that the second time all of the prompts are in the prefix cache."""
    wanted = [0, 2, -1]
    params = [SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=k) for k in wanted]
    with LLM(tiny_llama.path, **OPTIONS | changes) as llm:
        plain = generate(llm, PROMPTS, SamplingParams(temperature=0.0, max_tokens=3))
        for _ in range(2):
            outputs = generate(llm, PROMPTS, params)
            for prompt, k, output, other in zip(PROMPTS, wanted, outputs, plain, strict=True):
                assert output.prompt_logprobs is not None
                assert output.prompt_logprobs[0] is None
                assert len(output.prompt_logprobs) == len(prompt)
                rows = expected_logprobs(tiny_llama, prompt)
                for token, entry, row in zip(prompt[1:], output.prompt_logprobs[1:], rows[:-1], strict=True):
                    assert entry is not None
                    check_entry(entry, token, row, k)
                assert output.outputs[0].token_ids == other.outputs[0].token_ids
                assert other.prompt_logprobs is None


def test_of_the_prompt_of_several_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=3, prompt_logprobs=1, logprobs=0)
    single = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
    several, alone = generate(llm, [PROMPTS[2]] * 2, [params, single])
    assert several.prompt_logprobs == alone.prompt_logprobs
    assert [len(choice.logprobs or []) for choice in several.outputs] == [3, 3, 3]


def test_of_long_prompts(tiny_llama: TinyModel) -> None:
    """Longer than the pieces in which their logits are made."""
    (prompt,) = random_prompts((400,), seed=5)
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        (output,) = generate(llm, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    rows = expected_logprobs(tiny_llama, prompt)
    assert output.prompt_logprobs is not None
    found = [
        entry[token].logprob
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        if entry
    ]
    expected = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)
