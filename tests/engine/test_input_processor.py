"""Prompts to token ids (vllm#7283, vllm#54195)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedinfer.engine.input_processor import InputProcessor, ProcessedPrompt, truncate
from pagedinfer.sampling_params import SamplingParams


class LetterTokenizer:
    """One token for each letter: a is 0."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


@pytest.fixture
def processor() -> InputProcessor:
    return InputProcessor(LetterTokenizer(), vocab_size=26)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("abz", "abz", [0, 1, 25]),
        ({"prompt": "b"}, "b", [1]),
        ({"prompt_token_ids": [3, 4]}, None, [3, 4]),
        ({"prompt_token_ids": [3], "prompt": "d"}, "d", [3]),
        ({"prompt_token_ids": np.array([3, 25])}, None, [3, 25]),
        ([5], None, [5]),
        ([np.int32(5), np.int64(6)], None, [5, 6]),
    ],
)
def test_forms_of_a_prompt(processor: InputProcessor, prompt: Any, text: str, token_ids: list[int]) -> None:
    processed = processor.process(prompt)
    assert (processed.text, processed.token_ids) == (text, token_ids)
    assert all(type(token_id) is int for token_id in processed.token_ids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ("a\ud83db", r"must be Unicode text, got '\\ud83d', half a surrogate pair, at position 1"),
        ({"prompt": "a", "cache_salt": "b\ud83d"}, r"'cache_salt' must be Unicode text, got '\\ud83d'"),
        ({"prompt": ""}, "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([26], r"in \[0, 26\).*got 26"),
        ([0, -1], "got -1"),
        ([2**63], f"got {2**63}"),
        (["abc"], "got 'abc'"),
        ([1.0], "got 1.0"),
        ([True], "got True"),
        ({"prompt_token_ids": "abc"}, "must be a list"),
        ({"prompt_token_ids": 3}, "must be a list"),
        ({"prompt": 3}, "must be a string"),
        ({}, "neither"),
        ({"promt": "a"}, "did you mean 'prompt'"),
        (3, "must be a list"),
        (None, "must be a list"),
    ],
)
def test_what_is_refused(processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor.process(prompt)


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        InputProcessor(None, vocab_size=26).process("a")


@pytest.mark.parametrize(
    ("prompts", "token_ids"),
    [
        ("ab", [[0, 1]]),
        (["ab", "c"], [[0, 1], [2]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", {"prompt_token_ids": [7]}, [8]], [[0], [7], [8]]),
        ({"prompt": "a"}, [[0]]),
        ([], []),
    ],
)
def test_many_prompts(processor: InputProcessor, prompts: Any, token_ids: list[list[int]]) -> None:
    assert [prompt.token_ids for prompt in processor.process_all(prompts)] == token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", ""], "prompt 1 of 2: .*empty"),
        ([[]], "prompt 0 of 1: .*empty"),
        ([[1], [99]], "prompt 1 of 2: .*got 99"),
        (5, "a prompt or a list of prompts"),
        (b"abc", "a prompt or a list of prompts"),
    ],
)
def test_the_wrong_one_of_many_is_named(processor: InputProcessor, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor.process_all(prompts)


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"), [(None, 4, 80), (5, 4, 5), (100, 4, 80), (-1, 4, 60), (-1, None, 63)]
)
def test_truncation_keeps_the_last_tokens_and_all_else(
    limit: int | None, max_tokens: int | None, kept: int
) -> None:
    prompt = ProcessedPrompt("text", list(range(80)), cache_salt="salt")
    params = SamplingParams(truncate_prompt_tokens=limit, max_tokens=max_tokens)
    found = truncate(prompt, params, max_model_len=64)
    assert found == ProcessedPrompt("text", list(range(80 - kept, 80)), cache_salt="salt")
