"""response_format, structured_outputs and tool_choice through HTTP: the answers have their form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.rig import Client
from tests.tiny_models import byte_level_tokenizer

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": PERSON}},
    {"type": "function", "function": {"name": "wait"}},
]
MESSAGES = [{"role": "user", "content": "Who?"}]


def chat(server: Client, **fields: Any) -> Any:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 200} | fields)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def streamed(server: Client, **fields: Any) -> tuple[str, list[dict[str, str]], str]:
    events = server.stream("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 200} | fields)
    content, calls, reason = "", [], ""
    for event in events:
        [choice] = event["choices"]
        content += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", []):
            assert call["index"] == len(calls)
            assert call["type"] == "function"
            assert call["id"].startswith("call_")
            calls.append(call["function"])
        reason = choice["finish_reason"] or reason
    return content, calls, reason


def test_a_json_schema(server: Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        choice = chat(server, response_format=form, seed=seed)
        person = json.loads(choice["message"]["content"])
        assert person["name"] in ("ann", "bob")
        assert 0 <= person["age"] <= 99
        assert streamed(server, response_format=form, seed=seed)[0] == choice["message"]["content"]


def test_a_response_format_in_completions(server: Client) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["fox", 5]}}}
    assert json.loads(server.text("x", response_format=form, seed=1)) in ("fox", 5)
    both = server.complete("x", response_format=form, structured_outputs={"regex": "a"})
    assert both.status == 400
    assert "cannot be given together" in both.error["message"]


def test_any_json_object(server: Client) -> None:
    bias = {str(token): 5 for token in range(3, 320)}  # whatever; the form comes first
    choice = chat(server, response_format={"type": "json_object"}, seed=1, logit_bias=bias)
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].lstrip()[0] == "{"


def test_every_kind_in_completions(server: Client) -> None:
    for structured, pattern in (
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["fox", "dog"]}, "fox|dog"),
        ({"grammar": 'start: "<" /[0-9]{2}/ ">"'}, "<[0-9]{2}>"),
        ({"json": {"type": "boolean"}, "disable_any_whitespace": True}, "true|false"),
    ):
        body = {"structured_outputs": structured, "seed": 5, "max_tokens": 40}
        text = server.text("x", **body)
        assert re.fullmatch(pattern, text)
        events = server.stream("/v1/completions", {"prompt": "x"} | body)
        assert "".join(event["choices"][0]["text"] for event in events) == text


def test_a_tool_that_must_be_called(server: Client) -> None:
    choice_of = {"type": "function", "function": {"name": "look_up"}}
    choice = chat(server, tools=TOOLS, tool_choice=choice_of, seed=3)
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"name", "age"}
    assert choice["finish_reason"] == "stop"
    content, calls, reason = streamed(server, tools=TOOLS, tool_choice=choice_of, seed=3)
    assert (content, calls, reason) == ("", [call["function"]], "stop")


def test_some_tool_that_must_be_called(server: Client) -> None:
    space = {str(byte_level_tokenizer().encode(character)[0]): -100 for character in " \n\r\t"}
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"seed": 2, "logit_bias": space}  # of which a random model likes to write much
    choice = chat(server, **fields)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("look_up", "wait")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert choice["finish_reason"] == "tool_calls"
    assert streamed(server, **fields)[1] == [call["function"]]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"yaml": "a"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": "[" * 10_000}},
        {"structured_outputs": {"regex": "a" * 2**21}},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_forms_that_cannot_be_used(server: Client, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES} | fields)
    assert answer.status == 400
    assert answer.error["message"]


def test_many_at_once_are_what_they_are_alone(server: Client) -> None:
    from concurrent.futures import ThreadPoolExecutor

    form = {"type": "json_schema", "json_schema": {"schema": PERSON}}

    def ask(seed: int) -> str:
        return str(chat(server, response_format=form, seed=seed)["message"]["content"])

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone
