"""Grammars: what they allow, what is wrong with them, and that few of them are kept."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer import SamplingParams, StructuredOutputsParams
from pagedinfer.engine.grammars import MAX_CACHED_GRAMMARS, GrammarCompiler, check_grammar
from tests.tiny_models import EOS, VOCAB_SIZE, byte_level_tokenizer

pytest.importorskip("llguidance")

TOKENIZER = byte_level_tokenizer()
GRAMMARS = GrammarCompiler(lambda: TOKENIZER, VOCAB_SIZE, [EOS])


def accepts(params: StructuredOutputsParams, text: str) -> bool:
    matcher = GRAMMARS.matcher(params)
    return matcher.try_consume_tokens(TOKENIZER.encode(text)) == len(TOKENIZER.encode(text)) and bool(
        matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        (
            {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            '{"a": 5}',
            "{}",
        ),
        ({"json": '{"enum": ["x", 5]}'}, '"x"', '"y"'),
        ({"json_object": True}, '{"a": [1, {"b": null}]}', "[1]"),
        ({"json_object": True, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"regex": "[a-c]{2,3}x?"}, "abcx", "abcd"),
        ({"choice": ["yes", "no", 'a"b\\c\n日本']}, 'a"b\\c\n日本', "ye"),
        ({"grammar": 'start: "(" start ")" | "x"'}, "((x))", "((x)"),
    ],
    ids=str,
)
def test_what_they_allow(params: dict[str, Any], right: str, wrong: str) -> None:
    structured = StructuredOutputsParams(**params)
    check_grammar(structured)
    assert accepts(structured, right)
    assert not accepts(structured, wrong)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "one of json, regex, choice, grammar and json_object, got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json_object": False}, "got none"),
        ({"json_object": "yes"}, "true or false"),
        ({"json": 5}, "json must be a JSON schema"),
        ({"json": "["}, "json must be a JSON schema"),
        ({"json": {"a": object()}}, "json must be a JSON schema"),
        ({"regex": ""}, "regex must be a text"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": "ab"}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a"] * 20_000}, "choice may hold"),
        ({"grammar": "x" * 2**21}, "grammar may have"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_malformed_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**params)
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=params)  # type: ignore[arg-type]


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="structured_outputs has no 'yaml'; there are json, regex"):
        SamplingParams(structured_outputs={"yaml": "x"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [{"json": {"type": "nothing"}}, {"regex": "("}, {"grammar": "start: x"}, {"json": {"$ref": "#/x"}}],
    ids=str,
)
def test_grammars_that_cannot_be_used(params: dict[str, Any]) -> None:
    structured = StructuredOutputsParams(**params)
    for check in (check_grammar, GRAMMARS.matcher):
        with pytest.raises(ValueError, match="structured_outputs: the grammar cannot be used"):
            check(structured)


@pytest.mark.parametrize("params", [{"json": {"$ref": "#"}}, {"regex": r"[^\s\S]"}], ids=str)
def test_grammars_that_no_text_satisfies_are_refused_before_they_run(params: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be used: no text satisfies it, or it is too complex \(\w+\)"
    ):
        GRAMMARS.matcher(StructuredOutputsParams(**params))


def test_compiled_grammars_are_kept_but_not_all() -> None:
    grammars = GrammarCompiler(lambda: TOKENIZER, VOCAB_SIZE, [EOS])
    for i in range(MAX_CACHED_GRAMMARS + 10):
        grammars.matcher(StructuredOutputsParams(regex=f"a{{{i + 1}}}"))
    assert grammars.num_cached == MAX_CACHED_GRAMMARS
    one = StructuredOutputsParams(choice=["ab", "ac"])
    first, second = grammars.matcher(one), grammars.matcher(StructuredOutputsParams(choice=["ab", "ac"]))
    assert first.consume_tokens(TOKENIZER.encode("ab"))
    assert second.consume_tokens(TOKENIZER.encode("ac"))  # they share nothing that moves
    assert grammars.num_cached == MAX_CACHED_GRAMMARS


def test_without_a_tokenizer() -> None:
    grammars = GrammarCompiler(lambda: None, VOCAB_SIZE, [EOS])
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        grammars.matcher(StructuredOutputsParams(regex="a"))


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(VOCAB_SIZE, VOCAB_SIZE + 50))
def test_any_walk_through_a_mask_gives_the_form(seed: int, vocab_size: int) -> None:
    """Tokens that the tokenizer does not know are never allowed."""
    rng = np.random.default_rng(seed)
    grammars = GrammarCompiler(lambda: TOKENIZER, vocab_size, [EOS])
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    matcher = grammars.matcher(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    tokens: list[int] = []
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert allowed.max() < VOCAB_SIZE
        tokens.append(int(EOS if EOS in allowed else rng.choice(allowed)))
        matcher.consume_token(tokens[-1])
        if len(tokens) > 200:
            return  # a long number
    text = TOKENIZER.decode([token for token in tokens if token != EOS])
    assert isinstance(json.loads(text)["n"], int)


def test_parameters_go_to_other_processes() -> None:
    params = SamplingParams(structured_outputs={"json": {"type": "object"}})  # type: ignore[arg-type]
    assert isinstance(params.structured_outputs, StructuredOutputsParams)
    again = StructuredOutputsParams.from_mapping(params.structured_outputs.to_dict())
    assert again == params.structured_outputs
    assert hash(again) == hash(params.structured_outputs)


def test_many_masks_at_once_are_those_of_each_alone() -> None:
    texts = {
        "json": ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, '{"a": '),
        "regex": ({"regex": "[ab]{5}c"}, "ab"),
        "choice": ({"choice": ["fox", "dog and cat"]}, "dog"),
        "ended": ({"choice": ["fox"]}, "fox"),
    }
    matchers = []
    for params, text in texts.values():
        for count in range(len(TOKENIZER.encode(text)) + 1):
            matcher = GRAMMARS.matcher(StructuredOutputsParams(**params))
            matcher.try_consume_tokens(TOKENIZER.encode(text)[:count])
            matchers.append(matcher)
    together = GRAMMARS.masks(matchers)
    assert together.shape == (len(matchers), -(-VOCAB_SIZE // 32))
    for matcher, mask in zip(matchers, together, strict=True):
        alone = np.frombuffer(matcher.compute_bitmask(), np.int32)[: together.shape[1]]
        assert mask.tolist() == alone.tolist() == GRAMMARS.masks([matcher])[0].tolist()
        assert mask.any()
    assert GRAMMARS.masks([]).shape == (0, -(-VOCAB_SIZE // 32))
