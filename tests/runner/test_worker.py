"""The worker: the largest step, what is logged, and on a GPU the memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pagedinfer import LLM, OutOfMemoryError, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.runner.memory import GIB, MIB
from pagedinfer.runner.profile import largest_batch
from pagedinfer.runner.worker import Worker
from tests.conftest import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")


def make_worker(path: str, **options: Any) -> Worker:
    return Worker(EngineConfig(model=path, **options), ModelConfig.from_pretrained(path))


@pytest.mark.parametrize(
    ("seqs", "tokens", "length", "expected"),
    [
        (4, 100, 512, [97, 1, 1, 1]),
        (4, 100, 50, [50, 48, 1, 1]),
        (4, 100, 10, [10, 10, 10, 10]),
        (8, 3, 512, [1, 1, 1]),
        (1, 64, 512, [64]),
    ],
)
def test_the_largest_batch(seqs: int, tokens: int, length: int, expected: list[int]) -> None:
    batch = largest_batch(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length)
    assert [request.num_tokens for request in batch.requests] == expected
    assert [len(request.token_ids) for request in batch.admitted] == expected
    assert all(request.sample for request in batch.requests)


def test_the_largest_batch_runs_and_writes_nothing(tiny_llama: TinyModel, device: torch.device) -> None:
    worker = make_worker(
        tiny_llama.path, device=device.type, num_gpu_blocks_override=32, swap_space=0.0, max_num_seqs=5
    )
    cache = worker._runner._cache.blocks.fill_(3.0)
    worker._runner.profile(largest_batch(max_num_seqs=5, max_num_batched_tokens=300, max_model_len=200))
    assert (cache == 3.0).all()
    worker.close()


def test_what_is_logged(tiny_llama: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "pagedinfer"):
        make_worker(tiny_llama.path, device="cpu", num_gpu_blocks_override=1000).close()
    assert re.search(r"LlamaForCausalLM: \d+ MiB of weights in \d+\.\d s, float32 on cpu", caplog.text)
    # 1,000 blocks of 16 tokens x 2 layers x K and V x 2 heads x 64 x 4 bytes
    assert (
        "KV cache: 16,000 tokens (1,000 blocks, 31 MiB); 31.2 requests of 512 tokens at once" in caplog.text
    )


def test_float32_products_stay_float32_whatever_the_application_chose() -> None:
    from pagedinfer.runner.model_runner import _full_float32

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with _full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedinfer.runner import worker as worker_module
    from pagedinfer.runner.memory import Memory

    monkeypatch.setattr(worker_module, "cpu_memory", lambda: Memory(total=2 * MIB, free=MIB))
    monkeypatch.setattr(worker_module, "load_weights", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(
        OutOfMemoryError, match="weights need 2 MiB; of 2 MiB in total, 1 MiB are free on cpu"
    ):
        make_worker(tiny_llama.path, device="cpu")


# ---- on a GPU --------------------------------------------------------------------------------------

FULL = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, max_tokens=40, ignore_eos=True)


@pytest.mark.gpu
def test_memory_stays_within_the_budget_and_comes_back(tiny_llama: TinyModel) -> None:
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    with LLM(tiny_llama.path, device="cuda", gpu_memory_utilization=0.3, swap_space=0.5) as llm:
        worker = llm.llm_engine.worker
        meter = worker._meter
        assert meter is not None
        budget = int(meter.free * 0.3)
        assert worker.num_blocks * worker.block_bytes > budget // 2
        prompts = [{"prompt_token_ids": [5 + i % 300] * 470} for i in range(200)]
        llm.generate(prompts, FULL, use_tqdm=False)
        assert meter.peak_reserved() + meter.outside_torch() <= budget
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 600 * MIB  # the context, kernels and cuBLAS stay


@pytest.mark.gpu
def test_memory_comes_back_again_and_again(tiny_llama: TinyModel) -> None:
    free = []
    for _ in range(3):
        with LLM(tiny_llama.path, device="cuda", gpu_memory_utilization=0.2, swap_space=0.0) as llm:
            llm.generate("Hello", FULL, use_tqdm=False)
        free.append(torch.cuda.mem_get_info()[0])
    assert max(free) - min(free) < 64 * MIB


@pytest.mark.gpu
def test_a_cache_of_so_many_bytes_on_a_gpu(tiny_llama: TinyModel) -> None:
    options: dict[str, Any] = {"device": "cuda", "swap_space": 0.0}
    with LLM(tiny_llama.path, kv_cache_memory_bytes=GIB, **options) as llm:
        assert llm.llm_engine.worker.num_blocks == GIB // llm.llm_engine.worker.block_bytes
    with pytest.raises(OutOfMemoryError, match=r"kv_cache_memory_bytes=.*room for beside the weights"):
        LLM(tiny_llama.path, kv_cache_memory_bytes=2**50, **options)


@pytest.mark.gpu
def test_the_peak_of_memory_is_logged(tiny_llama: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"device": "cuda", "swap_space": 0.0, "num_gpu_blocks_override": 64}
    with caplog.at_level("INFO", "pagedinfer"):
        make_worker(tiny_llama.path, gpu_memory_utilization=0.96, **options).close()
    assert re.search(r"GPU memory: a peak of .* in a budget of .*gpu_memory_utilization=0\.\d+", caplog.text)
