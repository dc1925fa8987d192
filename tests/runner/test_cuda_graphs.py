"""Steps of decodes at padded sizes: what they are given and give, with and without a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedinfer import LLM, SamplingParams, ops
from pagedinfer.engine.batch import SharedPrefix
from pagedinfer.runner.cuda_graphs import PLAIN, DecodeGraphs, StepVariant
from pagedinfer.runner.graph_sizes import decode_sizes
from pagedinfer.runner.prefix_groups import PACKED_PREFIXES, pack_prefixes, unpack_prefixes
from pagedinfer.runner.step_result import DrawnTokens
from tests.conftest import TinyModel

ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 512,
    "swap_space": 0.0,
}


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 17, 256, 300, 512, 1024])
def test_sizes_waste_little(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, 512)
    for num_rows in range(1, sizes[-1] + 1):
        waste = min(size for size in sizes if size >= num_rows) - num_rows
        assert waste <= max(7, num_rows // 8)


def echo(
    packed: torch.Tensor, prefixes: torch.Tensor | None, drawn: DrawnTokens, variant: StepVariant
) -> ops.TopLogprobs | None:
    slots, lengths, blocks = packed
    drawn.token_ids.copy_(slots * 1000 + lengths)
    drawn.logprobs.copy_(blocks * 0.5)
    if variant.num_best is None:
        return None
    best = lengths.float()[:, None] - torch.arange(variant.num_best, device=packed.device)
    return ops.TopLogprobs(blocks.float(), slots.long(), best.long(), best)


def test_a_step_is_padded_and_gives_its_own_rows(device: torch.device) -> None:
    """Twice each: the first captures a graph, the second replays it with other inputs."""
    graphs = DecodeGraphs([1, 2, 5], device)
    for num_rows in (1, 2, 3, 4, 5) * 2:
        packed = np.random.default_rng(num_rows).integers(0, 100, (3, num_rows)).astype(np.int32)
        output = graphs.run(packed, echo).result()
        assert output.token_ids.tolist() == (packed[0] * 1000 + packed[1]).tolist()
        assert output.logprobs.tolist() == (packed[2] * 0.5).tolist()
    graphs.close()


def test_padding_has_no_slot_no_length_and_no_block(device: torch.device) -> None:
    graphs = DecodeGraphs([4], device)
    seen = torch.empty((3, 4), dtype=torch.int32, device=device)

    def look(
        packed: torch.Tensor, prefixes: torch.Tensor | None, drawn: DrawnTokens, variant: StepVariant
    ) -> None:
        seen.copy_(packed)

    graphs.run(np.array([[7], [8], [9]], np.int32), look).result()
    assert seen.tolist() == [[7, -1, -1, -1], [8, 0, 0, 0], [9, -1, -1, -1]]
    graphs.close()


def test_a_result_stays_when_the_next_step_has_run(device: torch.device) -> None:
    graphs = DecodeGraphs([2], device)
    first = graphs.run(np.array([[1], [1], [1]], np.int32), echo)
    second = graphs.run(np.array([[2], [2], [2]], np.int32), echo)
    assert (first.result().token_ids.tolist(), second.result().token_ids.tolist()) == ([1001], [2002])
    graphs.close()


def test_results_of_many_steps_are_taken_at_the_end(device: torch.device) -> None:
    """More of them than are ever under way; of sizes and variants that change from one to the next."""
    graphs = DecodeGraphs([1, 2, 5], device)
    variants = (PLAIN, StepVariant(num_best=2))
    results = []
    for number in range(24):
        num_rows = 1 + number % 5
        packed = np.arange(3 * num_rows, dtype=np.int32).reshape(3, num_rows) + 10 * number
        prefixes = pack_prefixes([SharedPrefix(num_rows, 64)]) if number % 3 == 0 else None
        results.append((packed, graphs.run(packed, echo, prefixes, variants[number % 2])))
    for number, (packed, result) in enumerate(results):
        output = result.result()
        assert output.token_ids.tolist() == (packed[0] * 1000 + packed[1]).tolist()
        assert output.logprobs.tolist() == (packed[2] * 0.5).tolist()
        assert (output.best is not None) == (number % 2 == 1)
    graphs.close()


def test_a_step_that_fails_leaves_the_others_as_they_are(device: torch.device) -> None:
    graphs = DecodeGraphs([1], device)

    def fail(
        packed: torch.Tensor, prefixes: torch.Tensor | None, drawn: DrawnTokens, variant: StepVariant
    ) -> None:
        raise ZeroDivisionError("here")

    for number in range(6):
        packed = np.array([[number], [1], [0]], np.int32)
        with pytest.raises(ZeroDivisionError, match="here"):
            graphs.run(packed, fail, None, StepVariant(num_best=1 + number))  # not captured yet, each time
        assert graphs.run(packed, echo).result().token_ids.tolist() == [1000 * number + 1]
    graphs.close()


def test_prefixes_come_with_a_step_that_has_some(device: torch.device) -> None:
    graphs = DecodeGraphs([2, 4], device)
    seen = torch.zeros(PACKED_PREFIXES, dtype=torch.int32, device=device)

    def look(
        packed: torch.Tensor, prefixes: torch.Tensor | None, drawn: DrawnTokens, variant: StepVariant
    ) -> None:
        assert variant.with_prefixes == (prefixes is not None)
        echo(packed, None, drawn, variant)
        seen.copy_(torch.full_like(seen, -1) if prefixes is None else prefixes)

    for num_rows in (2, 3):
        packed = np.full((3, num_rows), num_rows, np.int32)
        for groups in ([SharedPrefix(2, 64)], [], [SharedPrefix(2, 128), SharedPrefix(1, 192)]):
            prefixes = pack_prefixes(groups)
            output = graphs.run(packed, look, prefixes).result()
            assert output.token_ids.tolist() == [1001 * num_rows] * num_rows
            assert seen.tolist() == ([-1] * PACKED_PREFIXES if prefixes is None else prefixes.tolist())
    graphs.close()


def test_packed_prefixes() -> None:
    packed = pack_prefixes([SharedPrefix(3, 64), SharedPrefix(2, 640)])
    assert packed is not None
    prefixes = unpack_prefixes(torch.from_numpy(packed))
    assert prefixes.start.tolist() == [0, 3] + [5] * 31
    assert prefixes.lens.tolist() == [64, 640] + [0] * 30
    full = pack_prefixes([SharedPrefix(2, 64)] * 32)
    assert full is not None
    assert unpack_prefixes(torch.from_numpy(full)).start.tolist() == list(range(0, 65, 2))
    assert pack_prefixes([]) is None


def test_the_best_tokens_are_those_of_the_rows_that_are_there(device: torch.device) -> None:
    graphs = DecodeGraphs([2, 4], device)
    results = []
    for first in (10, 20):  # the second replays what the first captured
        packed = np.array([[5, 6, 7], [first, 11, 12], [1, 2, 3]], np.int32)
        results.append(graphs.run(packed, echo, None, StepVariant(num_best=2)))
    for first, result in zip((10, 20), results, strict=True):
        best = result.result().best
        assert best is not None
        assert best.ranks.tolist() == [5, 6, 7]
        assert best.top_ids.tolist() == [[first, first - 1], [11, 10], [12, 11]]
        assert best.logprobs.tolist() == [1.0, 2.0, 3.0]
    assert graphs.run(packed, echo).result().best is None
    graphs.close()


# ---- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_raises_its_own_error() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = DecodeGraphs([1], device)
    calls = []

    def fail_in_capture(
        packed: torch.Tensor, prefixes: torch.Tensor | None, drawn: DrawnTokens, variant: StepVariant
    ) -> None:
        calls.append(packed)
        if len(calls) == 2:
            raise ZeroDivisionError("here")

    packed = np.array([[0], [1], [0]], np.int32)
    with pytest.raises(ZeroDivisionError, match="here"):
        graphs.run(packed, fail_in_capture)
    assert graphs.run(packed, echo).result().token_ids.tolist() == [1]
    graphs.close()


@pytest.mark.gpu
def test_no_time_to_capture_at_the_start_means_on_first_use() -> None:
    graphs = DecodeGraphs([1, 2], torch.device("cuda", torch.cuda.current_device()))
    assert graphs.capture([2, 1], echo, seconds=0.0) == 0
    graphs.run(np.array([[0], [1], [0]], np.int32), echo).result()
    assert graphs.capture([2, 1], echo, seconds=0.0) == 1
    assert graphs.capture([2, 1], echo, seconds=60.0) == 2
    graphs.close()


@pytest.mark.gpu
def test_variants_that_are_not_used_any_more_are_dropped() -> None:
    graphs = DecodeGraphs([1, 2], torch.device("cuda", torch.cuda.current_device()))
    packed = np.array([[0], [1], [0]], np.int32)
    best = StepVariant(num_best=1)
    for variant in (PLAIN, best, StepVariant(changes=0), StepVariant(changes=0, num_best=1)):
        graphs.run(packed, echo, None, variant).result()
    assert len(graphs._graphs) == 4
    graphs.run(packed, echo, None, StepVariant(changes=1)).result()  # the tensors of number 0 are gone
    assert set(graphs._graphs) == {(1, PLAIN), (1, best), (1, StepVariant(changes=1))}
    for num_best in range(2, 60):
        graphs.run(packed, echo, None, StepVariant(num_best=num_best)).result()
        graphs.run(packed, echo, None, best).result()
    assert len(graphs._graphs) < 30
    assert {(1, PLAIN), (1, best)} <= set(graphs._graphs)
    graphs.close()


@pytest.mark.gpu
def test_penalties_biases_and_logprobs_are_those_without_graphs(tiny_llama: TinyModel) -> None:
    """Requests of every kind together, then of one kind after another: each is a variant of its own."""
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logprobs": 2},
        {"logit_bias": {7: 3.0, 9: -4.0}, "min_tokens": 5},
        {},
        {"presence_penalty": 0.5, "logprobs": 20},
        {"allowed_token_ids": list(range(40)), "logprobs": 0},
        {"bad_words": ["a b"], "logprobs": 8},
    ]
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 310 for j in range(1 + i)]} for i in range(9)]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=6 + 4 * i, ignore_eos=True, **kinds[i % len(kinds)]
        )
        for i in range(len(prompts))
    ]
    results = []
    for enforce_eager in (True, False):
        with LLM(tiny_llama.path, **ON_GPU, enforce_eager=enforce_eager) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for i in (0, 1, 2, 6):
                outputs += llm.generate(prompts[i], params[i], use_tqdm=False)
            variants = {variant for _, variant in llm.llm_engine.worker._runner._graphs._graphs}
        if not enforce_eager:
            assert {(v.changes is None, v.num_best) for v in variants} >= {
                (True, None),
                (True, 5),
                (False, None),
                (False, 20),
            }
        results.append([output.outputs[0] for output in outputs])
    for eager, captured in zip(*results, strict=True):
        assert eager.token_ids == captured.token_ids
        for one, other in zip(eager.logprobs or [], captured.logprobs or [], strict=True):
            assert {t: x.rank for t, x in one.items()} == {t: x.rank for t, x in other.items()}
            for token, logprob in one.items():
                assert other[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 24, 40])
def test_the_tokens_are_those_without_graphs(num_requests: int, tiny_llama: TinyModel) -> None:
    """Requests end one by one, so that many sizes are passed through; 40 are more than run at once."""
    prompts = [
        {"prompt_token_ids": [3 + (7 * i + j) % 310 for j in range(1 + i)]} for i in range(num_requests)
    ]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10 + 3 * i, ignore_eos=True)
        for i in range(num_requests)
    ]
    tokens = []
    for enforce_eager in (True, False):
        with LLM(tiny_llama.path, **ON_GPU, enforce_eager=enforce_eager) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            graphs = llm.llm_engine.worker._runner._graphs._graphs
            assert bool(graphs) != enforce_eager
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
