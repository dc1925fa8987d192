"""Tools and reasoning through HTTP: rendered by the template, and split off what the model writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.rig import Client, ServerThread

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{{ messages[-1].content }}{% for call in messages[-1].tool_calls or [] %}"
    "({{ call.function.arguments.city }}){% endfor %}"
    "{# <tool_call> #}"
)
"""The scripted engine repeats the prompt, which is the last message: what the model "writes"."""

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Client]:
    with ServerThread(model, scripted=True, chat_template=TEMPLATE) as server:
        yield server


def num_tokens(server: Client, body: dict[str, Any]) -> int:
    fields = ("messages", "tools", "chat_template_kwargs")
    request = {name: body[name] for name in fields if name in body}
    return int(server.post("/tokenize", request).json["count"])


def ask(server: Client, text: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The message, the same out of a stream, and the finish_reason. The engine stops after the prompt."""
    body = {"messages": [{"role": "user", "content": text}]} | fields
    body["max_tokens"] = num_tokens(server, body)
    whole = server.post("/v1/chat/completions", body)
    assert whole.status == 200, whole.body
    [choice] = whole.json["choices"]
    streamed: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in server.stream("/v1/chat/completions", body):
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            streamed[name] += delta.get(name, "")
        streamed["tool_calls"] += delta.get("tool_calls", [])
        reason = event["choices"][0]["finish_reason"]
    assert reason == choice["finish_reason"]
    return choice["message"], streamed, reason


def test_a_call_is_parsed_back(server: Client) -> None:
    text = "I look.\n" + CALL
    message, streamed, reason = ask(server, text, tools=[TOOL], chat_template_kwargs={})
    assert message["content"].endswith("I look.")
    [call] = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert streamed["content"] == message["content"]
    [delta] = streamed["tool_calls"]
    assert delta["function"] == call["function"]
    assert delta["index"] == 0
    assert reason == "length"  # the scripted engine ends by nothing else


def test_several_calls_or_only_one(server: Client) -> None:
    text = CALL + "\n" + CALL
    message, streamed, _ = ask(server, text, tools=[TOOL])
    assert len(message["tool_calls"]) == 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert [call["index"] for call in streamed["tool_calls"]] == [0, 1]
    message, streamed, _ = ask(server, text, tools=[TOOL], parallel_tool_calls=False)
    assert len(message["tool_calls"]) == len(streamed["tool_calls"]) == 1


def test_without_tools_a_call_is_text(server: Client) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message, streamed, _ = ask(server, CALL, **fields)
        assert message["content"] == streamed["content"]
        assert "<tool_call>" in message["content"]
        assert "tool_calls" not in message


def test_calls_of_the_conversation_reach_the_template_as_objects(server: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    body = {"messages": messages, "max_tokens": 7}
    assert server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == "x(Bonn)"
    call["function"]["arguments"] = "{"  # type: ignore[index]
    assert server.post("/v1/chat/completions", body).status == 200


def test_reasoning_is_split_off(model: str) -> None:
    template = "{{ messages[-1].content }}{# </think> #}"
    with ServerThread(model, scripted=True, chat_template=template) as server:
        text = "<think>\nWell, let me see.\n</think>\n\nYes."
        message, streamed, _ = ask(server, text)
        assert message["reasoning_content"] == streamed["reasoning_content"] == "Well, let me see."
        assert message["content"] == streamed["content"] == "Yes."
        message, streamed, _ = ask(server, text, include_reasoning=False)
        assert "reasoning_content" not in message
        assert streamed["reasoning_content"] == ""
        assert message["content"] == streamed["content"] == "Yes."


def test_arguments_are_valid_json(server: Client) -> None:
    message, _, _ = ask(server, CALL, tools=[TOOL])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Köln"}
