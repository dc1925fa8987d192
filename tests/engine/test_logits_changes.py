"""Penalties, biases, masks and bans through the engine: what is drawn, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation import logits_process

from pagedinfer import LLM, CompletionOutput, SamplingParams
from pagedinfer.engine.scheduler import Scheduler
from tests.conftest import TinyModel
from tests.models.parity import random_prompts, transformers_logits
from tests.tiny_models import EOS, make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

Ids = torch.LongTensor
Processor = Callable[[Ids, torch.FloatTensor], torch.FloatTensor]

OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 256, "max_num_seqs": 8}
PROMPTS = random_prompts((7, 20, 33), seed=4)
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def llm(request: pytest.FixtureRequest, tiny_llama: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_llama.path, **OPTIONS | {"device": request.param}) as llm:
        yield llm


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | changes)


def generate(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[CompletionOutput]:
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(requests, params, use_tqdm=False)]


def expected_greedy(model: TinyModel, prompt: list[int], processor: Processor) -> list[int]:
    """The tokens with transformers' model, and a processor called with all tokens and the last logits."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + NUM_TOKENS:
        logits = transformers_logits(model.reference, tokens)[-1:].clone()
        tokens.append(int(processor(torch.tensor([tokens]), logits).argmax()))
    return tokens[len(prompt) :]


def penalised(presence: float, frequency: float, num_prompt_tokens: int) -> Processor:
    """OpenAI's formula, which transformers does not have: over the generated tokens alone."""

    def process(tokens: Ids, logits: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.bincount(tokens[0, num_prompt_tokens:], minlength=logits.shape[-1])
        return logits - frequency * counts - presence * (counts > 0)

    return process


def test_the_repetition_penalty_is_transformers(llm: LLM, tiny_llama: TinyModel) -> None:
    for penalty in (1.5, 0.7):
        outputs = generate(llm, PROMPTS, greedy(repetition_penalty=penalty))
        processor = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.token_ids == expected_greedy(tiny_llama, prompt, processor)


def test_presence_and_frequency(llm: LLM, tiny_llama: TinyModel) -> None:
    """transformers#2302: they count what was generated, and nothing of the prompt."""
    for presence, frequency in ((2.0, 0.0), (0.0, 0.9), (-0.5, -0.1)):
        outputs = generate(llm, PROMPTS, greedy(presence_penalty=presence, frequency_penalty=frequency))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            processor = penalised(presence, frequency, len(prompt))
            assert output.token_ids == expected_greedy(tiny_llama, prompt, processor)


def test_biases_are_transformers(llm: LLM, tiny_llama: TinyModel) -> None:
    bias = {token: 3.0 - token % 7 for token in range(5, 60)}
    processor = logits_process.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    outputs = generate(llm, PROMPTS, greedy(logit_bias=bias))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == expected_greedy(tiny_llama, prompt, processor)


def test_only_allowed_tokens(llm: LLM, tiny_llama: TinyModel) -> None:
    allowed = [3, 31, 32, 63, 64, 200, 319]
    outputs = generate(llm, PROMPTS, greedy(allowed_token_ids=allowed))
    outside = torch.ones(320, dtype=torch.bool)
    outside[allowed] = False
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = expected_greedy(tiny_llama, prompt, lambda _, x: x.masked_fill(outside, -torch.inf))
        assert output.token_ids == expected
    (sampled,) = generate(llm, PROMPTS[:1], greedy(allowed_token_ids=allowed, temperature=2.0, seed=1))
    assert set(sampled.token_ids) <= set(allowed)
    assert len(set(sampled.token_ids)) > 3


def test_bad_words_are_transformers(llm: LLM, tiny_llama: TinyModel) -> None:
    """Words of one token and of several, taken from what would be generated otherwise: letters alone."""
    tokenizer = llm.get_tokenizer()
    letters = [token for token in range(320) if tokenizer.decode([token]).isalpha()][:40]
    others = torch.ones(320, dtype=torch.bool)
    others[letters] = False
    for prompt in PROMPTS:
        (free,) = generate(llm, [prompt], greedy(allowed_token_ids=letters))
        words = [tokenizer.decode(free.token_ids[a:b]) for a, b in ((2, 3), (5, 7), (9, 12))]
        ids = [list(each) for each in llm.llm_engine.input_processor.bad_word_ids(words)]
        assert {len(each) for each in ids} >= {1, 2}
        banned = logits_process.SequenceBiasLogitsProcessor({tuple(each): -torch.inf for each in ids})

        def process(tokens: Ids, logits: Any, first: int = len(prompt), banned: Any = banned) -> Any:
            return banned(tokens[:, first:], logits.masked_fill(others, -torch.inf))

        (output,) = generate(llm, [prompt], greedy(bad_words=words, allowed_token_ids=letters))
        assert output.token_ids == expected_greedy(tiny_llama, prompt, process)
        assert output.token_ids != free.token_ids
        assert not any(word in output.text for word in words)


def test_bad_words_look_at_the_end_of_the_output_alone(llm: LLM) -> None:
    """A word whose beginning is the prompt's end may be completed."""
    (free,) = generate(llm, PROMPTS[:1], greedy())
    prompt, first = PROMPTS[0], free.token_ids[0]
    engine = llm.llm_engine
    process = engine.input_processor.bad_word_ids
    engine.input_processor.bad_word_ids = lambda words: ((prompt[-1], first),) if words else ()  # type: ignore[method-assign]
    try:
        (output,) = generate(llm, [prompt], greedy(bad_words=["any"]))
    finally:
        engine.input_processor.bad_word_ids = process  # type: ignore[method-assign]
    assert output.token_ids[0] == first


def test_a_mixed_batch_gives_each_what_it_gets_alone(llm: LLM) -> None:
    """vllm#22180, vllm#51226: greedy rows with a ban, seeded ones, unseeded ones and plain ones."""
    params = [
        greedy(bad_words=["the", " fox"]),
        SamplingParams(temperature=1.0, seed=42, max_tokens=NUM_TOKENS, ignore_eos=True),
        greedy(),
        greedy(temperature=0.8, seed=0, repetition_penalty=1.3, presence_penalty=0.5),
        greedy(temperature=0.8, seed=7, logit_bias={9: 4.0}, min_tokens=4, ignore_eos=False),
        SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS),
        greedy(allowed_token_ids=list(range(100, 200)), logprobs=3),
        greedy(temperature=1.2, seed=3, logits_processors=[lambda _, row: row.flip(0)]),
    ]
    prompts = [PROMPTS[i % 3] for i in range(len(params))]
    alone = [generate(llm, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 3, 5, 1, 6, 4, 0, 2]):
        outputs = generate(llm, [prompts[i] for i in order], [params[i] for i in order])
        for i, output in zip(order, outputs, strict=True):
            if params[i].is_greedy or params[i].seed is not None:
                assert output.token_ids == alone[i].token_ids
            assert output.finish_reason in ("length", "stop")


def test_a_slot_forgets_what_was_in_it(tiny_llama: TinyModel) -> None:
    with LLM(tiny_llama.path, **OPTIONS | {"max_num_seqs": 1}) as llm:
        (before,) = generate(llm, PROMPTS[:1], greedy())
        everything = greedy(
            repetition_penalty=2.0, bad_words=["a b"], logit_bias={5: 50.0}, allowed_token_ids=[5, 6, 7]
        )
        (changed,) = generate(llm, PROMPTS[:1], everything)
        assert set(changed.token_ids) <= {5, 6, 7}
        (after,) = generate(llm, PROMPTS[:1], greedy())
        assert after.token_ids == before.token_ids


def test_nothing_is_allocated_unless_it_is_used(tiny_llama: TinyModel) -> None:
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        changes = llm.llm_engine.worker._runner._sampler._changes
        generate(llm, PROMPTS, greedy())
        assert changes._tensors is None
        generate(llm, PROMPTS, greedy(logit_bias={5: 1.0}))
        assert changes._tensors is not None
        assert changes._tensors.token_counts is None
        assert changes._tensors.allowed is None


def test_more_biases_than_there_was_room_for(llm: LLM) -> None:
    bias = dict.fromkeys(range(300), -100.0)
    outputs = generate(llm, PROMPTS[:2], [greedy(logit_bias={9: 100.0}), greedy(logit_bias=bias)])
    assert set(outputs[0].token_ids) == {9}
    assert min(outputs[1].token_ids) >= 300


# ---- min_tokens ------------------------------------------------------------------------------------


def test_eos_waits_for_min_tokens(llm: LLM) -> None:
    """vllm#21987: EOS is not drawn before, so that the text goes on without it, and is the next token."""
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, min_tokens=3, max_tokens=20)
    (output,) = generate(llm, PROMPTS[:1], params)
    assert len(output.token_ids) == 4
    assert output.token_ids[3] == EOS
    assert EOS not in output.token_ids[:3]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_stop_tokens_wait_for_min_tokens_too(llm: LLM) -> None:
    params = greedy(logit_bias={50: 100.0}, stop_token_ids=[50], min_tokens=3)
    (output,) = generate(llm, PROMPTS[:1], params)
    assert len(output.token_ids) == 4
    assert (output.finish_reason, output.stop_reason) == ("stop", 50)


def test_a_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    """vllm#21987: one that appears at the second token and at each after ends it after six."""
    stop = llm.get_tokenizer().decode([70])
    params = greedy(allowed_token_ids=[70], stop=stop, min_tokens=6)
    (output,) = generate(llm, PROMPTS[:1], params)
    assert len(output.token_ids) == 7
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens_beyond_the_context(tiny_llama: TinyModel) -> None:
    """vllm PR#51299: it ends with the context, and gives its blocks back."""
    with LLM(tiny_llama.path, **OPTIONS | {"max_model_len": 64}) as llm:
        free = llm.llm_engine.scheduler.kv.num_free
        for ignore_eos in (True, False):
            params = greedy(min_tokens=200, max_tokens=200, ignore_eos=ignore_eos)
            (output,) = generate(llm, PROMPTS[:1], params)
            assert output.finish_reason == "length"
            assert len(PROMPTS[0]) + len(output.token_ids) == 64
        assert llm.llm_engine.scheduler.kv.num_free == free


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token(llm: LLM, include: bool) -> None:
    """vllm PR#14624: stop token 50 is an ordinary one."""
    bias = {50: 100.0}
    params = greedy(
        logit_bias=bias, stop_token_ids=[50], include_stop_str_in_output=include, ignore_eos=False
    )
    (output,) = generate(llm, PROMPTS[:1], params)
    assert output.text == (llm.get_tokenizer().decode([50]) if include else "")
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("stop", 50, [50])
    # EOS as the last token that is allowed is a stop, not the end of the length.
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, max_tokens=1)
    (output,) = generate(llm, PROMPTS[:1], params)
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("stop", None, [EOS])


# ---- preemption, choices, bad input ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_penalties_and_bans_survive_preemption(mode: str, llm: LLM, tiny_llama: TinyModel) -> None:
    """vllm#16832, vllm PR#5349, vllm PR#19940: counts, seeds and bans go on where they were."""
    prompts = random_prompts((3, 16, 30, 64, 40), seed=8)
    params = [
        greedy(max_tokens=40, repetition_penalty=1.4),
        greedy(max_tokens=40, temperature=0.9, seed=1, presence_penalty=1.5, frequency_penalty=0.3),
        greedy(max_tokens=40, bad_words=["the", "th", "ing over"], logprobs=2),
        greedy(max_tokens=40, temperature=1.0, seed=2, logit_bias={7: 5.0}, repetition_penalty=1.2),
        greedy(max_tokens=40, min_tokens=38, stop_token_ids=list(range(3, 200)), ignore_eos=False),
    ]
    expected = generate(llm, prompts, params)
    small = {"num_gpu_blocks_override": 9, "max_model_len": 128, "swap_space": 0.01, "preemption_mode": mode}
    with LLM(tiny_llama.path, **OPTIONS | small | {"device": llm.llm_engine.config.device}) as other:
        engine = other.llm_engine
        engine.scheduler = Scheduler(replace(engine.scheduler.config, admission_policy="greedy"))
        outputs = generate(other, prompts, params)
        counters = engine.scheduler.counters
        preemptions = {
            "recompute": counters.num_preemptions_recompute,
            "swap": counters.num_preemptions_swap,
        }
        assert preemptions[mode] > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert (output.token_ids, output.text) == (wanted.token_ids, wanted.text)


def test_choices_differ_and_are_reproducible(llm: LLM) -> None:
    """vllm#10852: with flat logits."""
    flat = [lambda _, row: torch.zeros_like(row)]
    params = SamplingParams(
        n=4, temperature=1.0, seed=7, max_tokens=16, ignore_eos=True, logits_processors=flat
    )
    runs = [
        [choice.token_ids for choice in llm.generate("Hello", params, use_tqdm=False)[0].outputs]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4
    choices = llm.generate("Hello", SamplingParams(n=3, temperature=0.0), use_tqdm=False)[0].outputs
    assert [choice.token_ids for choice in choices] == [choices[0].token_ids] * 3


def test_penalties_out_of_range() -> None:
    """sglang PR#24874."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"):
        for value in (float("nan"), float("inf"), -3.0):
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: value})
    for value in (0, -1):
        with pytest.raises(ValueError, match="repetition_penalty"):
            SamplingParams(repetition_penalty=value)


@pytest.mark.parametrize("token", [320, -1, 2**63, "abc"])
def test_unknown_ids_are_refused_and_the_neighbour_goes_on(llm: LLM, token: Any) -> None:
    """vllm PR#16529, vllm#54195, vllm PR#9634."""
    engine = llm.llm_engine
    (alone,) = generate(llm, PROMPTS[:1], greedy())
    engine.add_request("neighbour", {"prompt_token_ids": PROMPTS[0]}, greedy())
    engine.step()
    fields = {"logit_bias": {token: 1.0}, "stop_token_ids": [token], "allowed_token_ids": [token]}
    for name, value in fields.items():
        with pytest.raises(ValueError, match=name):
            engine.add_request("wrong", "Hello", SamplingParams(min_tokens=1, **{name: value}))
    with pytest.raises(ValueError, match="token ids"):
        engine.add_request("wrong", {"prompt_token_ids": [token]}, greedy(min_tokens=1))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == alone.token_ids


def test_tokens_that_the_tokenizer_does_not_know(tmp_path: Any) -> None:
    """vllm#13175, vllm#516, vllm PR#56100: the model's vocabulary is padded, and its padding most likely."""
    make_llama(tmp_path, vocab_size=352)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        known = len(llm.get_tokenizer())
        assert known < 345
        bias = {345: 100.0, known - 1: 50.0}
        (output,) = generate(llm, PROMPTS[:1], greedy(logit_bias=bias, logprobs=2))
        assert set(output.token_ids) == {known - 1}
        assert output.logprobs is not None
        assert all(token < known for entry in output.logprobs for token in entry)
        (mate,) = generate(llm, [[345, 350, 5]], greedy())  # as part of a prompt they are accepted
        assert len(mate.token_ids) == NUM_TOKENS
