"""Ranks on GPUs: sharing one through gloo, and, where there are two, each with its own through NCCL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedinfer import LLM, RequestOutput, SamplingParams
from pagedinfer.distributed.peer_all_reduce import MOST_BYTES_VARIABLE
from pagedinfer.engine.scheduler import Scheduler
from tests.conftest import TinyModel
from tests.distributed.processes import rank_pids
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_tasks import logits_and_tokens
from tests.distributed.test_families import NUM_TOKENS, PROMPTS, make_case
from tests.distributed.test_faults import break_and_wait

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "kv_cache_memory_bytes": 2**26,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "swap_space": 0.01,
}
SMALL = {"num_gpu_blocks_override": 11, "max_model_len": 128, "preemption_mode": "swap"}
ONE_OF_EACH_FAMILY = [
    "Qwen2, tied",
    "Qwen3",
    "Mistral",
    "OPT",
    "GPT-2",
    "Phi-3",
    "Gemma 2",
    "Gemma 3",
    "Mixtral",
    "Qwen3-MoE",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, seed=2, n=4, max_tokens=40, ignore_eos=True),
]


def generate(path: str, **changes: Any) -> list[list[list[int]]]:
    """Twice the same prompts, the second time from the prefix cache; the tokens of each choice."""
    with LLM(path, **OPTIONS | changes) as llm:
        engine = llm.llm_engine
        engine.scheduler = Scheduler(replace(engine.scheduler.config, admission_policy="greedy"))
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs: list[RequestOutput] = []
        for _ in range(2):
            outputs += llm.generate(prompts, PARAMS, use_tqdm=False)
        swapped = engine.scheduler.counters.num_preemptions_swap
        assert (swapped > 0) == ("preemption_mode" in changes)
        assert swapped or any(output.num_cached_tokens for output in outputs[len(prompts) :])
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_two_ranks_share_a_gpu_through_gloo(tiny_llama: TinyModel) -> None:
    found = generate(tiny_llama.path, tensor_parallel_size=2, distributed_backend="gloo")
    assert found == generate(tiny_llama.path)


@two_gpus
@pytest.mark.parametrize(
    ("changes", "peer_bytes"),
    [({}, 0), ({}, 2**20), (SMALL | {"enforce_eager": True}, 0), (SMALL, 2**20)],
    ids=["graphs", "graphs, peer memory", "swap, eager", "swap, peer memory"],
)
def test_two_gpus(
    changes: dict[str, Any], peer_bytes: int, tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MOST_BYTES_VARIABLE, str(peer_bytes))
    assert generate(tiny_llama.path, tensor_parallel_size=2, **changes) == generate(tiny_llama.path)


@two_gpus
@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_rank_of_two_gpus_ends(rank: int, how: signal.Signals, tiny_llama: TinyModel) -> None:
    llm = LLM(tiny_llama.path, **OPTIONS, tensor_parallel_size=2)
    pid = rank_pids(llm)[rank]
    message = break_and_wait(llm, lambda: os.kill(pid, how), 0.2)
    assert f"rank {rank} (process {pid})" in message


@two_gpus
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_families_on_two_gpus(name: str, tmp_path: Path, rank_pool: Callable[..., RankPool]) -> None:
    make_case(tmp_path, name)
    task: dict[str, Any] = {"path": str(tmp_path), "prompts": PROMPTS, "num_tokens": NUM_TOKENS}
    logits, tokens = logits_and_tokens(**task, device="cuda")
    for found_logits, found_tokens in rank_pool(2, "cuda").run(logits_and_tokens, **task, device="cuda"):
        for one, other in zip(found_logits, logits, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=5e-4)
        assert found_tokens == tokens
