"""Sampling defaults from generation_config.json, and what else of a request is settled before it runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedinfer import LLM, SamplingParams
from pagedinfer.engine.generation_defaults import default_sampling_params
from tests.conftest import TinyModel
from tests.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_llama(path)
    config = {"temperature": 0.0, "top_k": 20, "max_new_tokens": 5, "eos_token_id": 2, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(config))
    return str(path)


def test_they_hold_for_requests_without_parameters(model: str) -> None:
    """vllm#15241: what a request brings wins, 0 and the usual defaults included."""
    with LLM(model, **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=20, max_tokens=5)
        first, second = (llm.generate("Hello", use_tqdm=False)[0].outputs[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert len(first.token_ids) == 5
        warm = llm.generate("Hello", SamplingParams(temperature=1.0, seed=1), use_tqdm=False)[0].outputs[0]
        assert len(warm.token_ids) == 16
        assert warm.token_ids[:5] != first.token_ids
        cold = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[
            0
        ]
        assert cold.token_ids == first.token_ids


def test_the_file_can_be_ignored_or_be_another(model: str, tmp_path: Path) -> None:
    with LLM(model, generation_config="vllm", **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    with LLM(model, generation_config=str(tmp_path), **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(repetition_penalty=1.1)


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pagedinfer"), "propagate", True)
    with caplog.at_level(logging.INFO, "pagedinfer"):
        default_sampling_params("auto", {"temperature": 1.0, "top_k": None, "transformers_version": "5"})
        assert not caplog.records
        default_sampling_params("auto", {"temperature": 0.1, "top_p": 1.0})
    (record,) = caplog.records
    assert "temperature=0.1;" in record.getMessage()
    assert 'generation_config="vllm"' in record.getMessage()


def test_what_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config must be .*got '.*nowhere'"):
        default_sampling_params(str(tmp_path / "nowhere"), {})
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature must be .*got 7"):
        default_sampling_params("auto", {"temperature": 7.0})


# ---- truncate_prompt_tokens, logits_processors -----------------------------------------------------


def test_prompts_are_truncated_from_the_left(tiny_llama: TinyModel) -> None:
    prompt = list(range(10, 90))
    with LLM(tiny_llama.path, **OPTIONS | {"max_model_len": 64}) as llm:
        for limit, kept in ((5, 5), (100, 80), (-1, 60)):
            params = SamplingParams(temperature=0.0, max_tokens=4, truncate_prompt_tokens=limit)
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            if kept == 80:
                assert output.outputs[0].finish_reason == "error"
                continue
            assert output.prompt_token_ids == prompt[-kept:]
            plain = SamplingParams(temperature=0.0, max_tokens=4)
            (other,) = llm.generate({"prompt_token_ids": prompt[-kept:]}, plain, use_tqdm=False)
            assert output.outputs[0].token_ids == other.outputs[0].token_ids


def test_logits_processors(tiny_llama: TinyModel) -> None:
    """They see what was generated so far, and their rows are what is drawn from, one after another."""
    seen: list[tuple[list[int], list[int]]] = []

    def next_to_the_last(prompt: list[int], output: list[int], row: torch.Tensor) -> torch.Tensor:
        assert row.dtype == torch.float32
        seen.append((prompt, output))
        row = torch.full_like(row, -torch.inf)
        row[(output or prompt)[-1] + 1] = 0.0
        return row

    def and_one_more(output: list[int], row: torch.Tensor) -> torch.Tensor:
        return row.roll(1)

    params = SamplingParams(max_tokens=4, logits_processors=[next_to_the_last, and_one_more], logprobs=1)
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        requests = [{"prompt_token_ids": [7, 20]}, {"prompt_token_ids": [9]}]
        plain = SamplingParams(temperature=0.0, max_tokens=4)
        output, mate = llm.generate(requests, [params, plain], use_tqdm=False)
        assert output.outputs[0].token_ids == [22, 24, 26, 28]
        assert seen == [([7, 20], [22, 24, 26][:n]) for n in range(4)]
        # Log-probabilities are the model's, not the processors'.
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert all(
            len(entry) == 2 and entry[t].rank != 1 for entry, t in zip(logprobs, [22, 24], strict=False)
        )
        total = sum(entry[token].logprob for entry, token in zip(logprobs, [22, 24, 26, 28], strict=True))
        assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-4)
        (alone,) = llm.generate(requests[1], plain, use_tqdm=False)
        assert mate.outputs[0].token_ids == alone.outputs[0].token_ids


def test_what_a_logits_processor_raises_is_raised(tiny_llama: TinyModel) -> None:
    def broken(output: list[int], row: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("mine")

    with LLM(tiny_llama.path, **OPTIONS) as llm:
        with pytest.raises(ArithmeticError, match="mine"):
            llm.generate("Hello", SamplingParams(logits_processors=[broken]), use_tqdm=False)
        assert len(llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids) > 0


@pytest.mark.parametrize(
    ("returned", "got"), [(None, "NoneType"), (torch.zeros(3), r"\[3\]"), (torch.tensor(1.0), r"\[\]")]
)
def test_a_logits_processor_must_return_the_row(returned: Any, got: str, tiny_llama: TinyModel) -> None:
    params = SamplingParams(logits_processors=[lambda output, row: returned])
    with LLM(tiny_llama.path, **OPTIONS) as llm:
        with pytest.raises(ValueError, match=rf"must return the row of logits.*\[320\], got {got}$"):
            llm.generate("Hello", params, use_tqdm=False)
        assert len(llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids) > 0
