"""LLM(..., tensor_parallel_size=2) as a user has it: real ranks, from their start to their end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedinfer import LLM, DeviceError, SamplingParams, WeightsError
from pagedinfer.config import EngineConfig
from pagedinfer.distributed.launch import choose_devices
from pagedinfer.structured_outputs import StructuredOutputsParams
from tests.conftest import TinyModel
from tests.distributed.processes import all_end, is_running, rank_pids
from tests.models.parity import random_prompts
from tests.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
}
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts((5, 33, 70))]


@pytest.fixture(scope="module")
def one_rank(tiny_llama: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two_ranks(tiny_llama: TinyModel) -> Iterator[LLM]:
    llm = LLM(tiny_llama.path, **OPTIONS, tensor_parallel_size=2, async_scheduling=True)
    yield llm
    pids = rank_pids(llm)
    assert all(map(is_running, pids))
    llm.close()
    llm.close()
    assert all_end(pids, 0.0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=20, frequency_penalty=0.5),
        SamplingParams(temperature=0.9, seed=4, logit_bias={7: 5.0}, min_tokens=4, bad_words=["the end"]),
    ],
)
def test_outputs_are_those_of_one_rank(params: SamplingParams, one_rank: LLM, two_ranks: LLM) -> None:
    for _ in range(2):  # the second time from the prefix cache
        found = two_ranks.generate(PROMPTS, params, use_tqdm=False)
        wanted = one_rank.generate(PROMPTS, params, use_tqdm=False)
        for one, other in zip(found, wanted, strict=True):
            assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
            assert [each.text for each in one.outputs] == [each.text for each in other.outputs]
            for choice, its in zip(one.outputs, other.outputs, strict=True):
                assert choice.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-3)
            if params.prompt_logprobs:
                assert one.prompt_logprobs is not None
                assert other.prompt_logprobs is not None
                assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
                assert [each and list(each) for each in one.prompt_logprobs] == [
                    each and list(each) for each in other.prompt_logprobs
                ]


@pytest.mark.trial  # each rank imports transformers
def test_a_structured_output_is_that_of_one_rank(one_rank: LLM, two_ranks: LLM) -> None:
    pytest.importorskip("llguidance")
    wanted = StructuredOutputsParams(regex="[a-c]{9}")
    params = SamplingParams(temperature=0.9, seed=5, structured_outputs=wanted)
    outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for llm in (one_rank, two_ranks)]
    for one, other in zip(*outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert re.fullmatch("[a-c]{9}", one.outputs[0].text)


def test_a_function_of_this_process_is_refused(two_ranks: LLM) -> None:
    params = SamplingParams(logits_processors=[lambda tokens, logits: logits])
    with pytest.raises(ValueError, match="logits_processors are functions of this process"):
        two_ranks.generate(PROMPTS, params, use_tqdm=False)


# CVE-2025-30165
def test_no_rank_listens_to_other_machines(two_ranks: LLM) -> None:
    sockets = {
        os.readlink(path) for pid in rank_pids(two_ranks) for path in Path(f"/proc/{pid}/fd").iterdir()
    }
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[i] for i in (1, 3, 9))
            listens = state == "0A" and f"socket:[{inode}]" in sockets
            assert not listens or address.partition(":")[0] == "0100007F"


def test_a_size_that_does_not_divide_the_model_starts_nothing(tiny_llama: TinyModel) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 does not divide .* possible are 1, 2, 4$"):
        LLM(tiny_llama.path, **OPTIONS, tensor_parallel_size=3)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="2 ranks need a GPU each, and there are 1"):
        choose_devices(EngineConfig(model="m", tensor_parallel_size=2), 2)
    assert choose_devices(EngineConfig(model="m", distributed_backend="gloo"), 2) == ("cuda", False)
    assert choose_devices(EngineConfig(model="m"), 1) == ("cuda", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_devices(EngineConfig(model="m"), 2) == ("cpu", False)
    with pytest.raises(DeviceError, match="needs GPUs"):
        choose_devices(EngineConfig(model="m", distributed_backend="nccl"), 2)


def test_what_a_rank_raises_while_it_loads_is_raised_here(tmp_path: Path) -> None:
    make_llama(tmp_path, shard_size="1GB")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        LLM(str(tmp_path), **OPTIONS, tensor_parallel_size=2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_program_needs_no_guard_and_its_ranks_do_not_outlive_it(
    how: signal.Signals, tiny_llama: TinyModel, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import time
            from pagedinfer import LLM, SamplingParams
            llm = LLM({tiny_llama.path!r}, tensor_parallel_size=2, **{OPTIONS!r})
            print(*llm.llm_engine.worker.pids, flush=True)
            while True:
                llm.generate(["hello"], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
            """
        )
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2, process.communicate()[1]
    time.sleep(0.2)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.send_signal(how)
    _, errors = process.communicate(timeout=20)
    assert all_end(pids, 10.0)
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert "EngineDeadError" not in errors
