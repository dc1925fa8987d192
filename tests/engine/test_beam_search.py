"""Beam search gives transformers' beams, whatever the engine has to do meanwhile (vllm#1101, vllm#6646)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedinfer import LLM, BeamSearchParams
from pagedinfer.beam_search import BeamSearchOutput
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
def test_the_beams_of_transformers(width: int, tiny_llama: TinyModel) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=20, ignore_eos=True)
    with LLM(tiny_llama.path, **OPTIONS) as llm:
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
