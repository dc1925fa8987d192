"""Stop strings and tokens: what text is shown, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pagedinfer import sampling_params
from pagedinfer.engine.output_text import OutputText
from pagedinfer.engine.stop_strings import StopStrings
from pagedinfer.sampling_params import SamplingParams

WORDS = ["<eos>", "one", "twothree", "four", "HA", "LT", "#", "eth", "etwothreef", "x", ".", "t", "wo"]


@pytest.fixture(autouse=True)
def _all_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_params, "NOT_SUPPORTED_YET", frozenset())


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Each word is a token; decoding puts them side by side."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = word_tokenizer()


def run(words: list[str], *, ended_by_token: bool = False, **params: Any) -> tuple[list[str], OutputText]:
    """What is shown with each token and at the end."""
    output = OutputText(TOKENIZER, SamplingParams(max_tokens=None, **params))
    deltas = []
    for i, word in enumerate(words):
        before = len(output.text)
        output.append([WORDS.index(word)], ended_by_token=ended_by_token and i == len(words) - 1)
        deltas.append(output.text[before:])
        if output.stop_string is not None:
            break
    before = len(output.text)
    output.finish()
    return [*deltas, output.text[before:]], output


# vllm#3572, TGI#1039
@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        ("two", False, "one"),
        ("two", True, "onetwo"),
        ("etwothreef", False, "on"),
        ("etwothreef", True, "onetwothreef"),
        ("ee", False, "onetwothr"),
        (["four", "two"], False, "one"),
        (["wo", "two"], False, "one"),
    ],
)
def test_stop_across_and_inside_tokens(stop: str | list[str], include: bool, text: str) -> None:
    _, output = run(["one", "twothree", "four"], stop=stop, include_stop_str_in_output=include)
    assert output.text == text
    assert output.stop_string == (stop if isinstance(stop, str) else "two")


def test_stop_that_is_not_there() -> None:
    found, output = run(["one", "twothree", "four"], stop="eth")
    assert found == ["on", "etwothre", "efour", ""]
    assert output.stop_string is None


def test_the_prompt_never_triggers() -> None:
    """Only generated tokens are seen, so a stop string that began in the prompt does not count."""
    _, output = run(["wo", "one"], stop="two")
    assert (output.text, output.stop_string) == ("woone", None)


# vllm#3574, #2577, #11089
@pytest.mark.parametrize(
    ("words", "deltas", "stop_string"),
    [
        (["x", "HA", "LT", "#"], ["x", "", "", "", ""], "HALT#"),
        (["x", "HA", "LT", "x"], ["x", "", "", "HALTx", ""], None),
        (["x", "HA"], ["x", "", "HA"], None),
        (["HA", "HA", "LT", "#"], ["", "HA", "", "", ""], "HALT#"),
    ],
)
def test_what_could_begin_a_stop_is_held_back(
    words: list[str], deltas: list[str], stop_string: str | None
) -> None:
    found, output = run(words, stop="HALT#")
    assert found == deltas
    assert output.stop_string == stop_string
    assert output.num_tokens == len(words)


def test_nothing_is_held_back_if_the_stop_is_included() -> None:
    found, output = run(["x", "HA", "LT", "#"], stop="HALT#", include_stop_str_in_output=True)
    assert found == ["x", "HA", "LT", "#", ""]
    assert output.stop_string == "HALT#"


# vllm#21987, vllm PR#46243
@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 2), (1, 2), (2, 4), (3, 4), (6, 7)])
def test_stops_before_min_tokens_do_not_count(min_tokens: int, num_tokens: int) -> None:
    words = ["x", ".", "x", ".", "x", ".", "."]
    _, output = run(words, stop=".", min_tokens=min_tokens)
    assert output.num_tokens == num_tokens
    assert output.text == "".join(words[: num_tokens - 1])


def test_stop_that_begins_before_min_tokens_and_ends_after() -> None:
    _, output = run(["x", "t", "wo", "x"], stop="two", min_tokens=2)
    assert (output.text, output.num_tokens) == ("x", 3)


# vllm PR#14624, #2538, PR#2976, TGI#1724
@pytest.mark.parametrize(("include", "text"), [(False, "onex"), (True, "onexfour")])
def test_text_of_a_stop_token(include: bool, text: str) -> None:
    _, output = run(
        ["one", "x", "four"],
        ended_by_token=True,
        stop_token_ids=[WORDS.index("four")],
        include_stop_str_in_output=include,
    )
    assert output.text == text
    assert output.num_tokens == 3
    assert output.stop_string is None


@pytest.mark.parametrize("skip", [True, False])
def test_text_of_eos(skip: bool) -> None:
    _, output = run(["one", "<eos>"], ended_by_token=True, skip_special_tokens=skip)
    assert output.text == "one"
    _, output = run(["one", "<eos>", "x"], skip_special_tokens=skip)  # ignored, in the middle
    assert output.text == ("onex" if skip else "one<eos>x")


def test_tokens_beyond_the_stop_are_not_taken() -> None:
    output = OutputText(TOKENIZER, SamplingParams(stop="two"))
    output.append([WORDS.index(word) for word in ("one", "twothree", "four", "x")])
    assert (output.text, output.num_tokens, output.stop_string) == ("one", 2, "two")
    output.finish()
    assert output.text == "one"


@settings(deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=20))
def test_deferred_text_is_the_same(words: list[str]) -> None:
    params = SamplingParams()
    now, later = OutputText(TOKENIZER, params), OutputText(TOKENIZER, params, defer=True)
    for word in words:
        for output in (now, later):
            output.append([WORDS.index(word)])
    assert later.text == ""
    for output in (now, later):
        output.finish()
        output.finish()
    assert later.text == now.text == "".join(words).replace("<eos>", "")
    assert later.num_tokens == now.num_tokens == len(words)


def first_stop(text: str, strings: list[str]) -> tuple[int, str] | None:
    """The oracle: reads the text letter by letter until one of the strings is complete."""
    for end in range(1, len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
    st.booleans(),
)
def test_any_pieces_and_strings(strings: list[str], text_pieces: list[str], include: bool) -> None:
    stops = StopStrings(strings, include=include)
    text, shown = "", ""
    for piece in text_pieces:
        text += piece
        shown += stops.append(piece)
        assert text.startswith(shown)
        if stops.found is not None:
            break
        # Held is what could become a stop string with what may come, and nothing else.
        held = text[len(shown) :]
        assert not held or any(string.startswith(held) for string in strings)
    expected = first_stop(text, strings)
    if expected is None:
        assert stops.found is None
        assert shown + stops.finish() == text
    else:
        start, string = expected
        assert stops.found == string
        assert shown == text[: start + len(string) if include else start]
        assert stops.finish() == ""
