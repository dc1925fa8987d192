"""Beam search gives transformers' beams, whatever the engine has to do meanwhile (vllm#1101, vllm#6646)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedinfer import LLM, BeamSearchParams, SamplingParams
from pagedinfer.beam_search import BeamSearchOutput
from pagedinfer.engine.beam_hypotheses import BeamHypotheses
from pagedinfer.engine.scheduler import Scheduler
from tests.conftest import TinyModel
from tests.models.parity import random_prompts
from tests.tiny_models import EOS

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts((1, 19, 37), seed=3)
OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 16}


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


@torch.inference_mode()
def transformers_beams(
    tiny: TinyModel, prompt: list[int], params: BeamSearchParams, eos: list[int] | None = None
) -> list[tuple[list[int], float]]:
    """(tokens, score) of each beam, its padding cut off."""
    eos = eos or [EOS]
    found = tiny.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=None if params.ignore_eos else eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for tokens, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        generated = tokens[len(prompt) :]
        if not params.ignore_eos:
            ends = [i for i, token in enumerate(generated) if token in eos]
            generated = generated[: ends[0] + 1] if ends else generated
        beams.append((prompt + generated[: params.max_tokens], score))
    return beams


def check(
    tiny: TinyModel,
    outputs: list[BeamSearchOutput],
    params: BeamSearchParams,
    eos: list[int] | None = None,
    prompts: list[list[int]] = PROMPTS,
) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = transformers_beams(tiny, prompt, params, eos)
        assert [each.tokens for each in output.sequences] == [tokens for tokens, _ in expected]
        scores = [score for _, score in expected]
        assert [each.score for each in output.sequences] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_the_beams_of_transformers(width: int, tiny_llama: TinyModel, device: torch.device) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=20, ignore_eos=True)
    with LLM(tiny_llama.path, **OPTIONS | {"device": device.type, "dtype": "float32"}) as llm:
        outputs = llm.beam_search(ids(PROMPTS), params)
        stats = llm.get_metrics()
        assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0
    if width == 1:
        found = tiny_llama.reference.generate(
            torch.tensor([PROMPTS[1]]), do_sample=False, max_new_tokens=20, min_new_tokens=20
        )
        assert outputs[1].sequences[0].tokens == found[0].tolist()
    else:
        check(tiny_llama, outputs, params)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
def test_when_texts_end(
    early_stopping: Any, length_penalty: float, tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = BeamSearchParams(
        beam_width=3,
        max_tokens=16,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        include_stop_str_in_output=True,
    )
    # Of 320 tokens every eighth ends a text: so some end early, some late, and some never.
    eos = list(range(3, 320, 8))
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        monkeypatch.setattr(llm.llm_engine._beam_searches, "_eos_token_ids", frozenset(eos))
        outputs = llm.beam_search(ids(PROMPTS), params)
    assert any(each.finish_reason == "stop" for output in outputs for each in output.sequences)
    check(tiny_llama, outputs, params, eos)


SMALL = {"num_gpu_blocks_override": 9, "max_model_len": 96}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 4, "max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        SMALL | {"preemption_mode": "recompute"},
        SMALL | {"preemption_mode": "recompute", "enable_prefix_caching": False},
        SMALL | {"preemption_mode": "swap", "swap_space": 0.01},
        {"num_gpu_blocks_override": 6, "max_model_len": 96, "max_num_seqs": 3},
    ],
    ids=["few slots", "no prefix cache", "recompute", "recompute, no prefix cache", "swap", "tiny"],
)
def test_the_same_beams_in_little_room(changes: dict[str, Any], tiny_llama: TinyModel) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True)
    with LLM(tiny_llama.path, **OPTIONS | changes) as llm:
        engine = llm.llm_engine
        scheduler = engine.scheduler = Scheduler(replace(engine.scheduler.config, admission_policy="greedy"))
        engine._beam_searches._scheduler = scheduler
        outputs = llm.beam_search(ids(PROMPTS), params)
        counters = scheduler.counters
        num_preemptions = counters.num_preemptions_recompute + counters.num_preemptions_swap
        assert llm.get_metrics().num_used_blocks == 0
    if "preemption_mode" in changes:
        assert num_preemptions > 0
    check(tiny_llama, outputs, params)


def test_the_prompt_is_computed_once(tiny_llama: TinyModel) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    with LLM(tiny_llama.path, **OPTIONS, enable_prefix_caching=False) as llm:
        (output,) = llm.beam_search(ids(PROMPTS[2:]), params)
        assert llm.get_metrics().counters.num_scheduled_tokens == 37 + 4 * 9
    assert 0 < output.metrics.queued_ts <= output.metrics.scheduled_ts <= output.metrics.first_token_ts
    assert output.metrics.first_token_ts < output.metrics.last_token_ts <= output.metrics.finished_ts
    assert output.metrics.num_generation_tokens == 1 + 4 * 9


@pytest.mark.parametrize("caching", [True, False])
def test_long_beams_in_a_pool_that_holds_them_only_shared(caching: bool, tiny_llama: TinyModel) -> None:
    """All beams run side by side, though apart they would need 40 blocks: nothing is computed for nothing."""
    params = BeamSearchParams(beam_width=4, max_tokens=150, ignore_eos=True)
    options = OPTIONS | {"num_gpu_blocks_override": 20, "max_model_len": 300}
    with LLM(tiny_llama.path, **options, enable_prefix_caching=caching) as llm:
        outputs = llm.beam_search(ids(PROMPTS[1:2]), params)
        assert llm.get_metrics().counters.num_scheduled_tokens == 19 + 4 * 149
        assert llm.get_metrics().num_used_blocks == 0
    check(tiny_llama, outputs, params, prompts=PROMPTS[1:2])


def test_eos_is_left_out_of_the_tokens_unless_it_is_wanted(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        eos = frozenset(range(3, 320, 2))
        monkeypatch.setattr(llm.llm_engine._beam_searches, "_eos_token_ids", eos)
        without, with_eos = (
            llm.beam_search("Hello", BeamSearchParams(beam_width=2, max_tokens=30, **more))[0].sequences[0]
            for more in ({}, {"include_stop_str_in_output": True})
        )
        assert with_eos.finish_reason == without.finish_reason == "stop"
        assert with_eos.tokens[-1] in eos
        assert without.tokens == with_eos.tokens[:-1]
        assert without.text == llm.get_tokenizer().decode(without.tokens)
        assert without.text.startswith("Hello")
        assert (without.score, without.cum_logprob) == (with_eos.score, with_eos.cum_logprob)


def test_beams_and_other_requests_side_by_side(tiny_llama: TinyModel) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        alone = llm.generate(ids(PROMPTS[:1]), greedy, use_tqdm=False)[0].outputs[0].token_ids
        beams = llm.beam_search(ids(PROMPTS[1:2]), params)[0].sequences
        engine = llm.llm_engine
        engine.add_request("a", ids(PROMPTS[:1])[0], greedy)
        engine.add_beam_search("b", ids(PROMPTS[1:2])[0], params)
        with pytest.raises(ValueError, match="unfinished request 'b'"):
            engine.add_beam_search("b", ids(PROMPTS[1:2])[0], params)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
        assert found["a"].outputs[0].token_ids == alone
        assert [PROMPTS[1] + each.token_ids for each in found["b"].outputs] == [each.tokens for each in beams]


def test_aborting_a_search_frees_everything(tiny_llama: TinyModel) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    with LLM(tiny_llama.path, **OPTIONS | {"max_num_seqs": 2}) as llm:
        engine = llm.llm_engine
        for name, prompt in zip("abc", ids(PROMPTS), strict=True):
            engine.add_beam_search(name, prompt, params)
        for _ in range(5):
            engine.step()
        assert engine.abort_request("c") is not None  # not begun
        output = engine.abort_request("a")
        assert output is not None
        assert [choice.finish_reason for choice in output.outputs] == ["abort", "abort"]
        assert engine.abort_request("a") is None
        assert engine.has_unfinished_requests()
        engine.abort_request("b")
        assert not engine.has_unfinished_requests()
        assert llm.get_metrics().num_used_blocks == 0


def test_logits_that_cannot_be_used_end_the_search(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        runner = llm.llm_engine.worker._runner
        compute = runner._compute_logits
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_compute_logits", lambda *args: compute(*args).fill_(float("nan")))
            (output,) = llm.beam_search("Hello", params)
        assert output.sequences == []
        assert output.error is not None
        assert "NaN" in output.error
        assert len(llm.beam_search("Hello", params)[0].sequences) == 2


def test_numbers_of_numpy_are_numbers_from_then_on() -> None:
    """As those of SamplingParams are."""
    given = {"beam_width": np.int64(2), "max_tokens": np.int8(100), "length_penalty": np.float16(1.5)}
    params = BeamSearchParams(**given)  # type: ignore[arg-type]
    kinds = [type(value) for value in (params.beam_width, params.max_tokens, params.length_penalty)]
    assert kinds == [int, int, float]
    assert params == BeamSearchParams(beam_width=2, max_tokens=100, length_penalty=1.5)


def test_what_cannot_be(tiny_llama: TinyModel) -> None:
    for options, message in (
        ({"beam_width": 0}, "beam_width must be an integer in \\[1, 64\\], got 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"temperature": 0.5}, "temperature must be 0"),
        ({"length_penalty": float("nan")}, r"length_penalty must be a number in \[-32, 32\], got nan"),
        ({"length_penalty": 1e308}, "got 1e\\+308"),  # would fail once tokens ** length_penalty is taken
        ({"length_penalty": -(10**400)}, "got -1000"),
        ({"early_stopping": "always"}, "early_stopping must be True, False"),
        ({"early_stopping": 1}, "early_stopping must be True, False"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 5} | options)
    with LLM(tiny_llama.path, **OPTIONS | {"max_num_seqs": 2}) as llm:
        with pytest.raises(ValueError, match="beam_width must be at most max_num_seqs=2, got 3"):
            llm.beam_search("Hello", BeamSearchParams(beam_width=3, max_tokens=5))
        with pytest.raises(ValueError, match="params must be BeamSearchParams, got SamplingParams"):
            llm.beam_search("Hello", SamplingParams())  # type: ignore[arg-type]
        long, short = llm.beam_search(
            ids([[5] * 512, [5] * 510]), BeamSearchParams(beam_width=2, max_tokens=5)
        )
        assert long.sequences == []
        assert "max_model_len" in str(long.error)
        assert [len(each.tokens) for each in short.sequences] == [512, 512]


def test_a_search_of_fewer_tokens_than_beams() -> None:
    """A vocabulary of two: all four texts of two tokens."""
    params = BeamSearchParams(beam_width=8, max_tokens=2)
    hypotheses = BeamHypotheses(params, frozenset(), 2)
    first = hypotheses.advance([([], 0.0)], [[(0, -0.5), (1, -1.0)]])
    assert [(each.beam, each.token_id) for each in first] == [(0, 0), (0, 1)]
    beams = [([each.token_id], each.cum_logprob) for each in first]
    assert hypotheses.advance(beams, [[(0, -0.1), (1, -2.0)], [(1, -0.2), (0, -3.0)]]) == []
    assert [each.token_ids for each in hypotheses.ended] == [[0, 0], [1, 1], [0, 1], [1, 0]]
