"""Whatever the engine does in between, the same requests get the same tokens (fp32, on the CPU).

Greedy and seeded sampling, and log-probabilities within 1e-4: through chunks, prefix hits, pools so small
that requests are preempted, swaps, and another order of arrival (vllm#16832, vllm#5349, vllm#19940).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pagedinfer import LLM, RequestOutput, SamplingParams
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.engine.stats import SchedulerCounters
from pagedinfer.runner.worker import Worker
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
    SamplingParams(temperature=1.3, top_k=20, seed=2, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
]

# Seven requests come to 497 tokens; the small pool holds 176, and the longest of them 105.
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
    "padded decodes": {},
    "padded decodes, recompute, chunks of 16": SMALL
    | {"preemption_mode": "recompute", "max_num_batched_tokens": 16},
    "padded decodes, swap": SMALL | {"preemption_mode": "swap", "swap_space": 0.01},
    "auto": SMALL | {"preemption_mode": "auto", "swap_space": 0.01},
}


def generate(path: str, order: list[int], **changes: Any) -> tuple[list[RequestOutput], SchedulerCounters]:
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
        prompts = [{"prompt_token_ids": PROMPTS[i]} for i in order]
        outputs = llm.generate(prompts, [PARAMS[i] for i in order], use_tqdm=False)
        return [outputs[order.index(i)] for i in range(len(order))], engine.scheduler.counters


@pytest.fixture(scope="module")
def expected(tiny_llama: TinyModel) -> Iterator[list[RequestOutput]]:
    """Each alone, all at once, in a large pool."""
    with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=256, enable_prefix_caching=False) as llm:
        yield [
            llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.mark.parametrize("name", ["default", "another order", *ENGINES])
def test_the_same_tokens(
    name: str, tiny_llama: TinyModel, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "padded" in name:  # as CUDA graphs are, here without a graph
        monkeypatch.setattr(Worker, "_decode_sizes", lambda worker: [1, 4, 16])
    order = list(range(len(PROMPTS)))
    if name == "another order":
        random.Random(3).shuffle(order)
    outputs, counters = generate(tiny_llama.path, order, **ENGINES.get(name, {}))
    for output, other in zip(outputs, expected, strict=True):
        found, wanted = output.outputs[0], other.outputs[0]
        assert found.token_ids == wanted.token_ids
        assert found.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=40 * 1e-4)
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
