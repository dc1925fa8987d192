"""From a step's tokens to what users get: texts, stop strings, stop tokens, reasons."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.output_processor import OutputProcessor
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.scheduler import RequestUpdate
from pagedinfer.outputs import CompletionOutput
from pagedinfer.sampling_params import RequestOutputKind, SamplingParams
from tests.tiny_models import byte_fallback_tokenizer, byte_level_tokenizer

WORDS = ["<eos>", "one", "twothree", "four", "HA", "LT", "#", "x", "t", "wo"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Each word is a token; decoding puts them side by side."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


class FakeScheduler:
    """Notes which request the processor ends, and why."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, RequestStatus, int | str | None]] = []

    def finish_request(self, request_id: str, status: RequestStatus, stop_reason: int | str | None) -> None:
        self.ended.append((request_id, status, stop_reason))


def run(
    tokenizer: PreTrainedTokenizerFast,
    token_ids: list[int],
    *,
    kind: RequestOutputKind = RequestOutputKind.DELTA,
    finish: str = "length",
    stop_reason: int | None = None,
    prompt: list[int] | None = None,
    **params: Any,
) -> list[CompletionOutput]:
    """A request whose steps draw these tokens, one each; the last one ends it as the scheduler would say."""
    request = Request("0", prompt or [1], SamplingParams(max_tokens=None, **params))
    processor, scheduler = OutputProcessor(tokenizer), FakeScheduler()
    processor.add(request, ProcessedPrompt(None, prompt or [1]), kind)
    outputs: list[CompletionOutput] = []
    for i, token in enumerate(token_ids):
        update = RequestUpdate(request, 0, [token], [0.0])
        request.token_ids.append(token)
        if i == len(token_ids) - 1:
            update.finish_reason, update.stop_reason = finish, stop_reason
        outputs += [output.outputs[0] for output in processor.process([update], scheduler)]
        if outputs and outputs[-1].finish_reason is not None:
            break
    if outputs[-1].stop_reason is not None and i < len(token_ids) - 1:
        assert scheduler.ended == [("0", RequestStatus.FINISHED_STOPPED, outputs[-1].stop_reason)]
    return outputs


def run_words(words: list[str], **options: Any) -> list[CompletionOutput]:
    return run(word_tokenizer(), [WORDS.index(word) for word in words], **options)


def joined(outputs: list[CompletionOutput]) -> str:
    return "".join(output.text for output in outputs)


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
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stop_across_and_inside_tokens(
    stop: str | list[str], include: bool, text: str, kind: RequestOutputKind
) -> None:
    outputs = run_words(
        ["one", "twothree", "four", "x"], stop=stop, include_stop_str_in_output=include, kind=kind
    )
    assert (joined(outputs) if kind is RequestOutputKind.DELTA else outputs[-1].text) == text
    expected = stop if isinstance(stop, str) else "two"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", expected)


def test_stop_that_is_not_there() -> None:
    outputs = run_words(["one", "twothree", "four"], stop="eth")
    assert [output.text for output in outputs] == ["on", "etwothre", "efour"]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("length", None)


def test_the_prompt_never_triggers() -> None:
    """Neither alone nor with what follows it."""
    outputs = run_words(["wo", "one"], stop="two", prompt=[WORDS.index("twothree"), WORDS.index("t")])
    assert joined(outputs) == "woone"
    assert outputs[-1].finish_reason == "length"


# vllm#3574, #2577, #11089
@pytest.mark.parametrize(
    ("words", "deltas", "stop_reason"),
    [
        (["x", "HA", "LT", "#"], ["x", "", "", ""], "HALT#"),
        (["x", "HA", "LT", "x"], ["x", "", "", "HALTx"], None),
        (["x", "HA"], ["x", "HA"], None),
        (["HA", "HA", "LT", "#"], ["", "HA", "", ""], "HALT#"),
    ],
)
def test_what_could_begin_a_stop_is_held_back(
    words: list[str], deltas: list[str], stop_reason: str | None
) -> None:
    outputs = run_words(words, stop="HALT#")
    assert [output.text for output in outputs] == deltas
    assert outputs[-1].stop_reason == stop_reason
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
        assert run_words(words, stop="HALT#", kind=kind)[-1].text == "".join(deltas)


def test_nothing_is_held_back_if_the_stop_is_included() -> None:
    outputs = run_words(["x", "HA", "LT", "#"], stop="HALT#", include_stop_str_in_output=True)
    assert [output.text for output in outputs] == ["x", "HA", "LT", "#"]
    assert outputs[-1].stop_reason == "HALT#"


# vllm PR#14624, #2538, PR#2976, TGI#1724
@pytest.mark.parametrize(("include", "text"), [(False, "onex"), (True, "onexfour")])
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_text_of_a_stop_token(include: bool, text: str, kind: RequestOutputKind) -> None:
    token = WORDS.index("four")
    outputs = run_words(
        ["one", "x", "four"],
        finish="stop",
        stop_reason=token,
        stop_token_ids=[token],
        include_stop_str_in_output=include,
        kind=kind,
    )
    last = outputs[-1]
    assert (joined(outputs) if kind is RequestOutputKind.DELTA else last.text) == text
    assert (last.finish_reason, last.stop_reason, last.token_ids[-1]) == ("stop", token, token)


@pytest.mark.parametrize("skip", [True, False])
def test_text_of_eos(skip: bool) -> None:
    outputs = run_words(["one", "<eos>"], finish="stop", skip_special_tokens=skip)
    assert joined(outputs) == "one"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
    ignored = run_words(["one", "<eos>", "x"], skip_special_tokens=skip)
    assert joined(ignored) == ("onex" if skip else "one<eos>x")


# mlx-vlm#1771, vllm#8627
@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_streamed_or_not_the_text_is_the_same(make_tokenizer: Any, cut: int) -> None:
    """Also where max_tokens cuts a character."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("the 中 fox 🔥", add_special_tokens=False)
    ids = ids[: len(ids) - cut]
    expected = tokenizer.backend_tokenizer.decode(ids)
    deltas = run(tokenizer, ids)
    assert joined(deltas) == expected
    assert not any("\N{REPLACEMENT CHARACTER}" in output.text for output in deltas[:-1])
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
        outputs = run(tokenizer, ids, kind=kind)
        assert (outputs[-1].text, outputs[-1].finish_reason) == (expected, "length")


def test_without_detokenization_there_is_no_text() -> None:
    outputs = run_words(["one", "x"], detokenize=False, kind=RequestOutputKind.CUMULATIVE)
    assert [output.text for output in outputs] == ["", ""]
    assert outputs[-1].token_ids == [WORDS.index("one"), WORDS.index("x")]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_stop_string_that_only_the_flush_completes(kind: RequestOutputKind) -> None:
    """The end of the text waited for the rest of a character; shown as U+FFFD, it is a stop string."""
    tokenizer = byte_level_tokenizer()
    (first, *_) = tokenizer.encode("é")  # the first of two bytes
    letters = tokenizer.encode("ab")
    outputs = run(tokenizer, [*letters, first], stop="b\N{REPLACEMENT CHARACTER}", kind=kind)
    assert (joined(outputs) if kind is RequestOutputKind.DELTA else outputs[-1].text) == "a"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "b\N{REPLACEMENT CHARACTER}")
