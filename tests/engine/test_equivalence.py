"""Whatever the engine does in between, the same requests get the same tokens (fp32, on the CPU).

Greedy and seeded sampling, and log-probabilities within 1e-4: through chunks, prefix hits, pools so small
that requests are preempted, swaps, steps that overlap, and another order of arrival (vllm#16832, vllm#5349,
vllm#19940). Two of the requests have four choices.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pagedinfer import LLM, RequestOutput, SamplingParams
from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.request_update import RequestUpdate
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.engine.stats import SchedulerCounters
from pagedinfer.runner.worker import Worker
from pagedinfer.sampling_params import RequestOutputKind
from tests.conftest import TinyModel
from tests.models.parity import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = random_prompts((40,), seed=7)[0]
PROMPTS = random_prompts((3, 16, 30, 64), seed=8) + [
    SHARED + each for each in random_prompts((1, 9, 24), seed=9)
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, seed=2, n=4, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.95, seed=5, n=4, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
]

# The thirteen choices come to 1,009 tokens; the small pool holds 176, and the longest of them 105.
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 11, "max_model_len": 128}
ENGINES: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "long prompts capped": {"long_prefill_token_threshold": 5},
    "recompute": SMALL | {"preemption_mode": "recompute"},
    "recompute, no prefix cache": SMALL | {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "recompute, chunks of 16": SMALL | {"preemption_mode": "recompute", "max_num_batched_tokens": 16},
    "swap": SMALL | {"preemption_mode": "swap", "swap_space": 0.01},
    "swap, no prefix cache": SMALL
    | {"preemption_mode": "swap", "swap_space": 0.01, "enable_prefix_caching": False},
    "swap, chunks of 16": SMALL
    | {"preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 16},
    "swap, room for two blocks": SMALL | {"preemption_mode": "swap", "swap_space": 2 * 2**15 / 2**30},
    "overlapped": {"async_scheduling": True},
    "overlapped, chunks of 1": {"async_scheduling": True, "max_num_batched_tokens": 1},
    "overlapped, recompute": SMALL | {"async_scheduling": True, "preemption_mode": "recompute"},
    "overlapped, swap": SMALL | {"async_scheduling": True, "preemption_mode": "swap", "swap_space": 0.01},
    "padded decodes": {},
    "padded decodes, overlapped, swap": SMALL
    | {"async_scheduling": True, "preemption_mode": "swap", "swap_space": 0.01},
    "padded decodes, recompute, chunks of 16": SMALL
    | {"preemption_mode": "recompute", "max_num_batched_tokens": 16},
    "padded decodes, swap": SMALL | {"preemption_mode": "swap", "swap_space": 0.01},
    "auto": SMALL | {"preemption_mode": "auto", "swap_space": 0.01},
}


Result = tuple[list[RequestOutput], list[list[list[float]]], SchedulerCounters]
"""Outputs, the log-probabilities of each one's choices, token by token, and what was counted."""


def record_logprobs(llm: LLM) -> dict[str, list[float]]:
    """By the scheduler's request, filled as the engine runs."""
    logprobs: dict[str, list[float]] = {}
    scheduler = llm.llm_engine.scheduler
    update = scheduler.update

    def recorded(batch: Batch, output: StepOutput, *streamed: Any) -> list[RequestUpdate]:
        updates = update(batch, output, *streamed)
        for each in updates:
            logprobs.setdefault(each.request_id, []).extend(each.logprobs)
        return updates

    scheduler.update = recorded  # type: ignore[method-assign]
    return logprobs


def of_choices(logprobs: dict[str, list[float]], output: RequestOutput) -> list[list[float]]:
    name = output.request_id
    return [logprobs[f"{name}#{i}" if i else name] for i in range(len(output.outputs))]


def generate(path: str, order: list[int], **changes: Any) -> Result:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 16,
    }
    with LLM(path, **options | changes) as llm:
        engine = llm.llm_engine
        # The default admission knows how to avoid most of the preemptions that this test is about.
        engine.scheduler = Scheduler(replace(engine.scheduler.config, admission_policy="greedy"))
        logprobs = record_logprobs(llm)
        prompts = [{"prompt_token_ids": PROMPTS[i]} for i in order]
        outputs = llm.generate(prompts, [PARAMS[i] for i in order], use_tqdm=False)
        outputs = [outputs[order.index(i)] for i in range(len(order))]
        assert llm.get_metrics().num_used_blocks == 0
        return outputs, [of_choices(logprobs, each) for each in outputs], engine.scheduler.counters


@pytest.fixture(scope="module")
def expected(tiny_llama: TinyModel) -> Result:
    """Each alone, all at once, in a large pool."""
    with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=256, enable_prefix_caching=False) as llm:
        logprobs = record_logprobs(llm)
        outputs = [
            llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        return outputs, [of_choices(logprobs, each) for each in outputs], llm.get_metrics().counters


def order_of(name: str) -> list[int]:
    """In which the requests arrive."""
    order = list(range(len(PROMPTS)))
    if name == "another order":
        random.Random(3).shuffle(order)
    return order


def check_same_tokens(found: Result, wanted: Result) -> None:
    for output, other, params in zip(found[0], wanted[0], PARAMS, strict=True):
        assert len(output.outputs) == params.n
        for choice, other_choice in zip(output.outputs, other.outputs, strict=True):
            assert choice.token_ids == other_choice.token_ids
            assert len(choice.token_ids) == params.max_tokens
    for choices, other_choices in zip(found[1], wanted[1], strict=True):
        for logprobs, other_logprobs in zip(choices, other_choices, strict=True):
            assert logprobs == pytest.approx(other_logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ["default", "another order", *ENGINES])
def test_the_same_tokens(
    name: str, tiny_llama: TinyModel, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "padded" in name:  # as CUDA graphs are, here without a graph
        monkeypatch.setattr(Worker, "_decode_sizes", lambda worker: [1, 4, 16])
        monkeypatch.setattr(Worker, "_forward_sizes", lambda worker: [4, 24, 64])
    found = generate(tiny_llama.path, order_of(name), **ENGINES.get(name, {}))
    check_same_tokens(found, expected)
    counters = found[2]
    recomputed, swapped = counters.num_preemptions_recompute, counters.num_preemptions_swap
    if "two blocks" in name:
        assert recomputed > 0
    elif "recompute" in name:
        assert recomputed > 0
        assert swapped == 0
    elif "swap" in name:
        assert swapped > 0
    elif name == "auto":
        assert recomputed + swapped > 0
    else:
        assert recomputed == swapped == 0


@pytest.mark.parametrize("num_cpu_blocks", [0, 2])
def test_many_choices_with_too_little_room_to_swap(num_cpu_blocks: int, tiny_llama: TinyModel) -> None:
    """vllm#787, vllm#546: eight choices in a pool for three, and next to nothing to swap them to."""
    params = SamplingParams(n=8, temperature=1.0, seed=6, max_tokens=40, ignore_eos=True)
    prompt, other = ({"prompt_token_ids": PROMPTS[i]} for i in (2, 1))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 16}
    with LLM(tiny_llama.path, **options, num_gpu_blocks_override=256) as llm:
        (wanted,) = llm.generate(prompt, params, use_tqdm=False)
    small = SMALL | {"preemption_mode": "swap", "swap_space": num_cpu_blocks * 2**15 / 2**30}
    with LLM(tiny_llama.path, **options | small) as llm:
        scheduler = llm.llm_engine.scheduler = Scheduler(
            replace(llm.llm_engine.scheduler.config, admission_policy="greedy")
        )
        assert scheduler.config.num_cpu_blocks == num_cpu_blocks
        (found,) = llm.generate(prompt, params, use_tqdm=False)
        assert scheduler.counters.num_preemptions_recompute > 0
        assert llm.get_metrics().num_used_blocks == llm.get_metrics().num_used_cpu_blocks == 0
        (later,) = llm.generate(other, PARAMS[1], use_tqdm=False)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in wanted.outputs]
    assert [each.finish_reason for each in found.outputs] == ["length"] * 8
    counters = scheduler.counters
    assert (counters.num_preemptions_swap > 0) == (num_cpu_blocks > 0)
    num_preemptions = counters.num_preemptions_recompute + counters.num_preemptions_swap
    assert found.metrics.num_preemptions == num_preemptions
    assert len(later.outputs[0].token_ids) == 40


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_streamed_pieces_add_up_across_preemptions(
    mode: str, tiny_llama: TinyModel, expected: Result
) -> None:
    """vllm#16832: after a preemption text came twice, or not at all."""
    options: dict[str, Any] = SMALL | {"device": "cpu", "dtype": "float32", "max_num_seqs": 16}
    with LLM(tiny_llama.path, **options, preemption_mode=mode, swap_space=0.01) as llm:  # type: ignore[arg-type]
        engine = llm.llm_engine
        engine.scheduler = Scheduler(replace(engine.scheduler.config, admission_policy="greedy"))
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            kind = RequestOutputKind.DELTA
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params, output_kind=kind)
        texts: dict[tuple[str, int], str] = {}
        tokens: dict[tuple[str, int], list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                for choice in output.outputs:
                    key = output.request_id, choice.index
                    texts[key] = texts.get(key, "") + choice.text
                    tokens.setdefault(key, []).extend(choice.token_ids)
        assert engine.scheduler.counters.num_preemptions > 0
    for i, output in enumerate(expected[0]):
        for choice in output.outputs:
            assert tokens[str(i), choice.index] == choice.token_ids
            assert texts[str(i), choice.index] == choice.text
