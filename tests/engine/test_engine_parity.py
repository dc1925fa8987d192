"""Greedy tokens and their log-probabilities through the whole engine, against transformers, in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pagedinfer import LLM, LLMEngine, RequestOutput, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sampling_params import RequestOutputKind
from tests.conftest import TinyModel
from tests.models.parity import TOLERANCE, random_prompts, transformers_logits
from tests.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 64
PROMPTS = random_prompts((1, 5, 16, 17, 33, 100))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)

MODELS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head, head_dim 80": {"num_key_value_heads": 4, "head_dim": 80},
    "multi-query, head_dim 96, tied": {
        "num_key_value_heads": 1,
        "head_dim": 96,
        "tie_word_embeddings": True,
    },
    "nine heads on three": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim 128": {"head_dim": 128},
}

# A pool of 224 tokens cannot hold the 556 tokens that the six requests come to: some are preempted.
SMALL_POOL = {"max_model_len": 192, "enable_prefix_caching": False}
ENGINES: dict[str, dict[str, Any]] = {
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 16, blocks of 8": {"max_num_batched_tokens": 16, "block_size": 8},
    "chunks of 16, blocks of 32": {"max_num_batched_tokens": 16, "block_size": 32},
    "one token a step": {"max_num_batched_tokens": 1, "max_num_seqs": 4},
    "two at a time": {"max_num_seqs": 2},
    "small pool": {"num_gpu_blocks_override": 14, **SMALL_POOL},
    "small pool, swap": {
        "num_gpu_blocks_override": 14,
        "preemption_mode": "swap",
        "swap_space": 0.01,
        **SMALL_POOL,
    },
    "small pool, blocks of 8, chunks of 16": {
        "num_gpu_blocks_override": 28,
        "block_size": 8,
        "max_num_batched_tokens": 16,
        **SMALL_POOL,
    },
    "small pool, blocks of 32": {"num_gpu_blocks_override": 7, "block_size": 32, **SMALL_POOL},
}


@torch.inference_mode()
def transformers_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
    )
    return tokens[0, len(prompt) :].tolist()


class Expected:
    """What transformers gives for PROMPTS: tokens, and the logits that each was chosen from."""

    def __init__(self, reference: PreTrainedModel) -> None:
        reference.generation_config.eos_token_id = None
        self.tokens = [transformers_greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]
        self.logits = [
            transformers_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
            for prompt, tokens in zip(PROMPTS, self.tokens, strict=True)
        ]

    def logprobs(self, i: int) -> torch.Tensor:
        chosen = torch.tensor(self.tokens[i])
        return self.logits[i].log_softmax(-1).gather(1, chosen[:, None])[:, 0]

    def check(self, outputs: list[RequestOutput]) -> None:
        assert [output.outputs[0].token_ids for output in outputs] == self.tokens
        for i, output in enumerate(outputs):
            found = output.outputs[0].cumulative_logprob
            assert found == pytest.approx(self.logprobs(i).sum().item(), abs=NUM_TOKENS * TOLERANCE)
            assert output.outputs[0].finish_reason == "length"


@pytest.fixture(scope="module")
def expected(tiny_llama: TinyModel) -> Expected:
    return Expected(tiny_llama.reference)


def options(device: torch.device, **changes: Any) -> dict[str, Any]:
    return {
        "device": device.type,
        "dtype": "float32",
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "swap_space": 0.0,
    } | changes


def generate(path: str, device: torch.device, **changes: Any) -> list[RequestOutput]:
    with LLM(path, **options(device, **changes)) as llm:
        admit_greedily(llm)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return llm.generate(prompts, GREEDY, use_tqdm=False)


def admit_greedily(llm: LLM) -> None:
    """The default admission knows how to avoid the preemptions that these tests are about."""
    engine = llm.llm_engine
    engine.scheduler = Scheduler(replace(engine.scheduler.config, admission_policy="greedy"))


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path, device: torch.device) -> None:
    reference = make_llama(tmp_path, **MODELS[name])
    Expected(reference).check(generate(str(tmp_path), device))


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tiny_llama: TinyModel, expected: Expected, device: torch.device) -> None:
    outputs = generate(tiny_llama.path, device, **ENGINES[name])
    expected.check(outputs)
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert (preemptions > 0) == ("small pool" in name)


def test_every_logit_is_transformers(
    tiny_llama: TinyModel, expected: Expected, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time, so that the rows of logits are those of its tokens."""
    from pagedinfer.models.llama import LlamaForCausalLM

    rows: list[torch.Tensor] = []
    compute = LlamaForCausalLM.compute_logits

    def record(model: LlamaForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(model, hidden)
        rows.append(logits.cpu())
        return logits

    # The replay of a CUDA graph would not come through here.
    with LLM(tiny_llama.path, **options(device, max_num_batched_tokens=16, enforce_eager=True)) as llm:
        monkeypatch.setattr(LlamaForCausalLM, "compute_logits", record)
        for i, prompt in enumerate(PROMPTS):
            rows.clear()
            llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
            torch.testing.assert_close(torch.cat(rows), expected.logits[i], rtol=0, atol=TOLERANCE)


def test_every_step_gives_the_logprob_of_its_token(
    tiny_llama: TinyModel, expected: Expected, device: torch.device
) -> None:
    engine = LLMEngine(EngineConfig(model=tiny_llama.path, **options(device, max_num_batched_tokens=16)))
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, GREEDY, output_kind=RequestOutputKind.DELTA)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    sums: list[list[float]] = [[] for _ in PROMPTS]
    while engine.has_unfinished_requests():
        for output in engine.step():
            choice = output.outputs[0]
            assert choice.cumulative_logprob is not None
            tokens[int(output.request_id)] += choice.token_ids
            sums[int(output.request_id)].append(choice.cumulative_logprob)
    engine.close()
    assert tokens == expected.tokens
    for i, each in enumerate(sums):
        found = torch.tensor(each, dtype=torch.float64).diff(prepend=torch.zeros(1, dtype=torch.float64))
        torch.testing.assert_close(found.float(), expected.logprobs(i), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_of_three_prompts_of_a_hundred(
    prefix_caching: bool, tiny_llama: TinyModel, device: torch.device
) -> None:
    """sglang#2282: chunked prefill with the prefix cache off."""
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts((100, 100, 100), seed=5)]
    tokens = []
    for changes in (
        {"enable_prefix_caching": prefix_caching, "max_num_batched_tokens": 16, "max_num_seqs": 2},
        {"enable_prefix_caching": False},
    ):
        with LLM(tiny_llama.path, **options(device, **changes)) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
