"""The model's part of any step at padded sizes: what it is given and gives, with and without a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedinfer import LLM, SamplingParams
from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.runner.forward_graphs import ForwardGraphs
from pagedinfer.runner.graph_recorder import GraphRecorder
from pagedinfer.runner.graph_sizes import forward_sizes
from pagedinfer.runner.input_batch import InputBatch, StepShape
from tests.conftest import TinyModel


@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 16, 100, 2048, 3000, 16384])
def test_sizes_waste_little(max_num_batched_tokens: int) -> None:
    sizes = forward_sizes(max_num_batched_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_batched_tokens, 2048)
    for num_tokens in range(1, sizes[-1] + 1):
        waste = min(size for size in sizes if size >= num_tokens) - num_tokens
        assert waste < max(64, num_tokens // 8)


def test_what_a_step_is_padded_to() -> None:
    graphs = ForwardGraphs([4, 64], 16, torch.device("cpu"))
    assert graphs.shape_for(1) == graphs.shape_for(4) == StepShape(4, 4, 4)
    assert graphs.shape_for(5) == graphs.shape_for(64) == StepShape(64, 16, 64)
    assert graphs.shape_for(65) is None
    assert ForwardGraphs([], 16, torch.device("cpu")).shape_for(1) is None


class Steps:
    """Batches of one prompt each, and a model that gives a token's id and position for its hidden state."""

    def __init__(self, device: torch.device) -> None:
        self.inputs = InputBatch(max_num_seqs=4, max_model_len=128, block_size=8, device=device)
        recorder = GraphRecorder(device) if device.type == "cuda" else None
        self.graphs = ForwardGraphs([4, 16, 64], 4, device, recorder=recorder)
        self.calls: list[StepShape] = []

    def forward(self, packed: Tensor, shape: StepShape) -> Tensor:
        self.calls.append(shape)
        inputs = self.inputs.unpack(packed, shape)
        return torch.stack([inputs.input_ids, inputs.positions], dim=1).float()

    def run(self, length: int, first_id: int) -> list[list[float]]:
        token_ids = list(range(first_id, first_id + length))
        request = AdmittedRequest("0", 0, token_ids, length, list(range(16)), SamplingParams(), 0)
        self.inputs.admit(request)
        batch = Batch(1, admitted=[request], requests=[ScheduledRequest("0", 0, 0, length, True, [])])
        step = self.inputs.send(batch, self.graphs.shape_for(length))
        rows: list[list[float]] = self.graphs.run(step, self.forward)[:length].tolist()
        return rows


def test_a_step_gives_its_own_rows(device: torch.device) -> None:
    """Three times each: on a GPU the first captures a graph, and the others replay it."""
    steps = Steps(device)
    for first_id, length in [(100 * turn, length) for turn in range(3) for length in (1, 3, 4, 9, 40, 64)]:
        assert steps.run(length, first_id) == [[first_id + i, i] for i in range(length)]
    num_runs = 6 if device.type == "cuda" else 18  # each size as it is, and captured
    assert len(steps.calls) == num_runs
    steps.graphs.close()


# ---- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graphs_from_the_start_are_those_of_the_steps() -> None:
    steps = Steps(torch.device("cuda", torch.cuda.current_device()))
    capture = steps.graphs.capture
    assert capture([64, 4], steps.forward, steps.inputs.padding, seconds=0.0) == 0
    assert capture([64, 4], steps.forward, steps.inputs.padding, seconds=60.0) == 2
    steps.calls.clear()
    assert steps.run(3, 10) == [[10, 0], [11, 1], [12, 2]]
    assert steps.run(33, 20) == [[20 + i, i] for i in range(33)]
    assert steps.calls == []
    assert steps.run(5, 30) == [[30 + i, i] for i in range(5)]
    assert steps.calls == [StepShape(16, 4, 16)] * 2
    steps.graphs.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24},
        {"async_scheduling": False, "preemption_mode": "recompute", "num_gpu_blocks_override": 24},
        {"num_gpu_blocks_override": 24, "swap_space": 0.01},
    ],
    ids=["", "chunks", "preempted, one by one", "swapped"],
)
def test_the_tokens_are_those_without_graphs(options: dict[str, Any], tiny_llama: TinyModel) -> None:
    """Prompts join decodes; some want what keeps a step out of the graphs of decodes."""
    kinds: list[dict[str, Any]] = [
        {},
        {"logits_processors": [lambda output, logits: logits.roll(1)]},
        {"prompt_logprobs": 1},
        {"logprobs": 50},
        {"repetition_penalty": 1.2},
    ]
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 310 for j in range(1 + 5 * i)]} for i in range(20)]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=10 + 3 * i, ignore_eos=True, **kinds[i % len(kinds)]
        )
        for i in range(len(prompts))
    ]
    fixed = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 256,
        "max_logprobs": 50,
    }
    tokens = []
    for enforce_eager in (True, False):
        with LLM(tiny_llama.path, **fixed | options, enforce_eager=enforce_eager) as llm:
            engine = llm.llm_engine  # the default admission avoids most preemptions
            engine.scheduler = Scheduler(replace(engine.scheduler.config, admission_policy="greedy"))
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert bool(engine.worker._runner._forward_graphs._graphs) != enforce_eager
        tokens.append([output.outputs[0].token_ids for output in outputs])
        if "num_gpu_blocks_override" in options:
            assert engine.scheduler.counters.num_preemptions > 0
    assert tokens[0] == tokens[1]
