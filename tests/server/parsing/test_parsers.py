"""Reasoning and tool calls out of a model's text, however it is cut into parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedinfer.server.parsing.choose import ParserChoice, reasoning_parser_of, tool_call_parser_of
from pagedinfer.server.parsing.pieces import Call, Content, Parser, Piece, PlainParser, Reasoning
from pagedinfer.server.parsing.reasoning import ThinkParser, prompt_ends_inside
from pagedinfer.server.parsing.tool_calls import (
    BareCallParser,
    CallListParser,
    ForcedCallParser,
    TaggedCallParser,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
WEATHER = Call("get_weather", '{"city": "Köln"}')


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return (
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        + "\n</tool_call>"
    )


def parse(parser: Parser, *parts: str) -> list[Piece]:
    """The pieces, neighbours of one kind joined."""
    found: list[Piece] = []
    for piece in [piece for part in parts for piece in parser.feed(part)] + parser.finish():
        last = found[-1] if found else None
        if isinstance(piece, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + piece.text)
        else:
            found.append(piece)
    return found


CASES: list[tuple[str, str, list[Piece]]] = [
    ("hermes", "Hello.", [Content("Hello.")]),
    ("hermes", "a < b, <tool", [Content("a < b, <tool")]),
    ("hermes", hermes("get_weather", {"city": "Köln"}), [WEATHER]),
    ("hermes", "I look.\n\n" + hermes("get_weather", {"city": "Köln"}), [Content("I look."), WEATHER]),
    (
        "hermes",
        hermes("stop", {}) + "\n" + hermes("get_weather", {"city": "Köln"}),
        [Call("stop", "{}"), WEATHER],
    ),
    ("hermes", hermes("stop", {}) + "\nDone.", [Call("stop", "{}"), Content("Done.")]),
    ("hermes", hermes("get_weather", {"city": "Köln"}).removesuffix("</tool_call>"), [WEATHER]),
    ("hermes", "<tool_call>\nnonsense\n</tool_call>", [Content("<tool_call>\nnonsense\n</tool_call>")]),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', [Content('<tool_call>{"name": 5}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "sto', [Content('<tool_call>{"name": "sto')]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Köln\\"}"}</tool_call>',
        [WEATHER],
    ),
    (
        "qwen",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
        [Call("get_weather", '{"city": "Köln", "days": 3, "exact": true}')],
    ),
    (
        "qwen",
        "<tool_call><function=get_weather><parameter=city>5\n6</parameter></function></tool_call>",
        [Call("get_weather", '{"city": "5\\n6"}')],
    ),
    ("llama3", "Hello {", [Content("Hello {")]),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Köln"}}', [WEATHER]),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln"}}', [WEATHER]),
    (
        "llama3",
        '{"name": "stop", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Köln"}}',
        [Call("stop", "{}"), WEATHER],
    ),
    ("llama3", '{"name": "unknown", "parameters": {}}', [Content('{"name": "unknown", "parameters": {}}')]),
    ("llama3", '{"a": {"b": 1}}', [Content('{"a": {"b": 1}}')]),
    ("llama3", '{"name": "stop", "para', [Content('{"name": "stop", "para')]),
    (
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "}{"}}',
        [Call("get_weather", '{"city": "}{"}')],
    ),
]


@pytest.mark.parametrize(("kind", "text", "pieces"), CASES)
def test_tool_calls(kind: str, text: str, pieces: list[Piece]) -> None:
    def parser() -> Parser:
        return BareCallParser(TOOLS) if kind == "llama3" else TaggedCallParser(TOOLS)

    assert parse(parser(), text) == pieces
    assert parse(parser(), *text) == pieces
    for i in range(len(text)):
        assert parse(parser(), text[:i], text[i:]) == pieces


THOUGHTS: list[tuple[bool, str, list[Piece]]] = [
    (False, "Hello.", [Content("Hello.")]),
    (False, "<think>\nhm\n</think>\n\nHello.", [Reasoning("hm"), Content("Hello.")]),
    (False, " \n<think>a</think>b", [Reasoning("a"), Content("b")]),
    (False, "<think>\n\n</think>\n\nHello.", [Content("Hello.")]),
    (False, "<think>a < b</thin", [Reasoning("a < b</thin")]),
    (False, "<thi", [Content("<thi")]),
    (False, "  ", [Content("  ")]),
    (False, "a <think>b</think>", [Content("a <think>b</think>")]),
    (True, "hm, \n hm\n</think>\n\nHello.\n", [Reasoning("hm, \n hm"), Content("Hello.\n")]),
    (True, "hm ", [Reasoning("hm")]),
    (True, "</think>Hello.", [Content("Hello.")]),
    (True, "", []),
]


@pytest.mark.parametrize(("inside", "text", "pieces"), THOUGHTS)
def test_reasoning(inside: bool, text: str, pieces: list[Piece]) -> None:
    assert parse(ThinkParser(inside=inside), text) == pieces
    assert parse(ThinkParser(inside=inside), *text) == pieces
    for i in range(len(text)):
        assert parse(ThinkParser(inside=inside), text[:i], text[i:]) == pieces


def test_reasoning_and_then_a_call() -> None:
    choice = ParserChoice("<tool_call> </think>")
    text = "<think>which?</think>\n\nI look." + hermes("get_weather", {"city": "Köln"})
    pieces: list[Piece] = [Reasoning("which?"), Content("I look."), WEATHER]
    assert parse(choice.parser("", TOOLS), text) == pieces
    assert parse(choice.parser("", TOOLS), *text) == pieces


TEXTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            '{"name": "stop"}',
            " ",
            "\n",
            "a",
            "<",
            "{",
            "}",
        ]
    ),
    max_size=12,
)


@given(
    TEXTS, st.sampled_from(["hermes", "llama3", "none"]), st.sampled_from(["think", "none"]), st.booleans()
)
def test_how_a_text_is_cut_does_not_matter(
    parts: list[str], tools: str, reasoning: str, inside: bool
) -> None:
    choice = ParserChoice("", tool_calls=tools, reasoning=reasoning)
    prompt = "<think>" if inside else ""
    text = "".join(parts)
    whole = parse(choice.parser(prompt, TOOLS), text)
    assert parse(choice.parser(prompt, TOOLS), *parts) == whole
    assert parse(choice.parser(prompt, TOOLS), *text) == whole
    if tools == reasoning == "none":
        assert whole == ([Content(text)] if text else [])


def test_forced_calls() -> None:
    assert parse(ForcedCallParser("f"), '{"a"', ": 1} ") == [Call("f", '{"a": 1}')]
    calls = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert parse(CallListParser(), *calls) == [Call("f", '{"a": 1}'), Call("g", "{}")]
    assert parse(CallListParser(), calls[:-3]) == [Content(calls[:-3])]


def test_the_parser_is_chosen_by_the_template() -> None:
    assert tool_call_parser_of("... <tool_call> ...") == "hermes"
    assert tool_call_parser_of("<|start_header_id|> {% if tools %}") == "llama3"
    assert tool_call_parser_of("{{ messages }}") is None
    assert reasoning_parser_of("... </think> ...") == "think"
    assert reasoning_parser_of("...") is None
    assert prompt_ends_inside("... <think>\n")
    assert not prompt_ends_inside("<think> </think>")
    plain = ParserChoice("<tool_call> </think>", tool_calls="none", reasoning="none")
    assert isinstance(plain.parser("", TOOLS), PlainParser)
    assert isinstance(ParserChoice("<tool_call>").parser("", []), PlainParser)  # no tools, no calls
