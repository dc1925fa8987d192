"""The distribution that tokens are drawn from, against the sampler's oracle; and through the engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagedinfer import LLM, SamplingParams
from pagedinfer.runner.processed_logits import changed_logits, filtered_logits
from tests import reference
from tests.conftest import TinyModel
from tests.models.parity import random_prompts
from tests.sampler.slots import mixed_parameters
from tests.sampler.test_logits_changes import random_changes

NUM_SLOTS, VOCAB_SIZE = 60, 77


def test_changes_are_the_oracles() -> None:
    generator = torch.Generator().manual_seed(0)
    changes = random_changes(NUM_SLOTS, VOCAB_SIZE, generator)
    logits = 5 * torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=generator)
    slots = torch.randperm(NUM_SLOTS, generator=generator)
    found = changed_logits(logits, slots, changes)
    for row, slot in enumerate(slots.tolist()):
        expected = reference.changed_logits(logits[row].numpy(), slot, changes)
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(changed_logits(logits, slots, None), logits)


def test_filters_keep_what_the_oracle_keeps() -> None:
    """But for a token at the boundary of top-p, which no row of these is close enough to."""
    generator = torch.Generator().manual_seed(1)
    parameters = mixed_parameters(NUM_SLOTS, generator)
    filters = {name: parameters[name] for name in ("temperature", "top_k", "top_p", "min_p")}  # type: ignore[literal-required]
    logits = 3 * torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=generator)
    first = logits.argmax(dim=-1)
    found = filtered_logits(logits, torch.arange(NUM_SLOTS), first, **filters)
    num_filtered = 0
    for slot in range(NUM_SLOTS):
        values = [filters[name][slot].item() for name in filters]
        if np.float32(values[0]) < np.float32(1e-5):
            assert torch.equal(found[slot], logits[slot])
            continue
        kept, _ = reference.kept_tokens(logits[slot].numpy(), *values)
        assert set(torch.isfinite(found[slot]).nonzero()[:, 0].tolist()) == set(kept.tolist())
        num_filtered += len(kept) < VOCAB_SIZE
        probabilities = torch.softmax(logits[slot, kept].double() / values[0], dim=0)
        torch.testing.assert_close(found[slot, kept].double().softmax(0), probabilities, rtol=1e-4, atol=1e-6)
    assert num_filtered > 20


@pytest.mark.usefixtures("one_thread")
def test_the_modes_through_the_engine(tiny_llama: TinyModel) -> None:
    """The same tokens; processed, no more tokens than top-k keeps, whose probabilities sum to one."""
    (prompt,) = random_prompts((9,), seed=3)
    params = [
        SamplingParams(temperature=0.7, top_k=4, seed=1, max_tokens=8, ignore_eos=True, logprobs=6),
        SamplingParams(temperature=0.0, logit_bias={9: 100.0}, max_tokens=8, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.9, seed=2, max_tokens=8, ignore_eos=True, logprobs=0),
    ]
    results = []
    for mode in ("raw_logprobs", "processed_logprobs"):
        with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=64, logprobs_mode=mode) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt}] * 3, params, use_tqdm=False)
            results.append([output.outputs[0] for output in outputs])
    raw, processed = results
    assert [choice.token_ids for choice in raw] == [choice.token_ids for choice in processed]
    for one, other in zip(raw[0].logprobs or [], processed[0].logprobs or [], strict=True):
        assert list(one)[:4] == list(other)
        ratio = torch.tensor([one[token].logprob for token in other]) / 0.7
        expected = ratio.log_softmax(0)
        torch.testing.assert_close(
            torch.tensor([x.logprob for x in other.values()]), expected, atol=1e-4, rtol=0
        )
    assert processed[1].cumulative_logprob == pytest.approx(0.0, abs=1e-3)
    assert raw[1].cumulative_logprob < -1
    # Without filters only the temperature is between the two.
    assert processed[2].cumulative_logprob != pytest.approx(raw[2].cumulative_logprob, abs=1e-2)
    total = sum(
        entry[t].logprob for entry, t in zip(processed[0].logprobs or [], processed[0].token_ids, strict=True)
    )
    assert processed[0].cumulative_logprob == pytest.approx(total, abs=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_penalties_by_hand(tiny_llama: TinyModel) -> None:
    """transformers#2302, vllm-metal PR#69: token 5, three times in the prompt, beside tokens of logit 0."""

    def fixed(logit: float) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        def process(output: list[int], row: torch.Tensor) -> torch.Tensor:
            row = torch.zeros_like(row)
            row[5] = logit
            return row

        return process

    def logits_of_5(llm: LLM, logit: float, **penalty: float) -> list[float]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=2,
            ignore_eos=True,
            logprobs=-1,
            logits_processors=[fixed(logit)],
            **penalty,  # type: ignore[arg-type]
        )
        (output,) = llm.generate({"prompt_token_ids": [5, 5, 5]}, params, use_tqdm=False)
        return [entry[5].logprob - entry[300].logprob for entry in output.outputs[0].logprobs or []]

    with LLM(
        tiny_llama.path,
        device="cpu",
        num_gpu_blocks_override=64,
        max_logprobs=-1,
        logprobs_mode="processed_logprobs",
    ) as llm:
        assert logits_of_5(llm, -2.0, repetition_penalty=1.5) == pytest.approx([-3.0, -3.0], abs=1e-4)
        # Presence and frequency count what was generated: nothing of the prompt, 5 once after the first step.
        assert logits_of_5(llm, 3.0, presence_penalty=2.0) == pytest.approx([3.0, 1.0], abs=1e-4)
        assert logits_of_5(llm, 3.0, frequency_penalty=0.5) == pytest.approx([3.0, 2.5], abs=1e-4)
