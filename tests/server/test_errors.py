"""Malformed requests of every kind: 4xx with an error object, never a 500, and the server goes on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.rig import Answer, Client

ROUTES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
JSON = {"content-type": "application/json"}
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def check_refused(answer: Answer) -> None:
    assert 400 <= answer.status < 500, answer
    assert answer.error["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        "[]",
        "5",
        '"a"',
        "{}",
        '{"prompt"}',
        '{"prompt": }',
        "[" * 100_000,
        '{"prompt": ' + "[" * 900 + "]" * 900 + "}",
        '{"a":' * 5000 + "1" + "}" * 5000,
        "\x00\x01",
        b"\xff\xfe\x00",
        b'{"prompt": "\xff"}',
        '{"prompt": "a", "prompt": 5, "messages": 5, "tokens": 5}',
        '{"prompt": "a", "messages": "a", "tokens": "a", "seed": ' + "9" * 5000 + "}",
        '{"prompt": "a", "messages": "a", "tokens": "a", "temperature": 1e999}',
        '{"prompt": "a", "messages": "a", "tokens": "a", "temperature": -Infinity}',
        '{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}], "tokens": [1e99]}',
        '{"\\ud800": 1}',
        '{"prompt": "a", "messages": "a", "tokens": "a", "": 1}',
    ],
    ids=lambda body: repr(body)[:40],
)
def test_malformed_bodies(echo: Client, route: str, body: str | bytes) -> None:
    """vllm#35438."""
    check_refused(echo.request("POST", route, body, JSON))


@pytest.mark.parametrize("route", ROUTES)
def test_wrong_types_everywhere(echo: Client, route: str) -> None:
    """CVE-2025-48944. `null` means that a parameter is not given."""
    schema = echo.get("/openapi.json").json
    reference = schema["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = schema["components"]["schemas"][reference["$ref"].rpartition("/")[2]]["properties"]
    values: list[Any] = [
        {},
        [],
        "",
        "x",
        -1,
        2**70,
        0.5,
        True,
        [[]],
        {"a": {"b": [None]}},
        "\ud800",
        [None],
        1e308,
    ]
    for name in properties:
        for value in values:
            body = json.dumps(RIGHT[route] | {name: value})
            answer = echo.request("POST", route, body, JSON)
            assert answer.status < 500, (name, value, answer)
            if answer.status != 200 and not answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.error["message"], (name, value)
    assert echo.post(route, RIGHT[route]).status == 200


def test_messages_of_any_kind(echo: Client) -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    for message in (
        {"role": "user", "content": deep},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": ["x"]}]},
        {"role": {}, "content": "x"},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "tool", "content": None, "tool_call_id": 5},
        {"role": "user", "content": "a" * 100_000},
        {"role": "user", "content": "{{ 1/0 }} {% x %}"},
        {"role": "user"},
    ):
        answer = echo.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
        assert answer.status in (200, 400), (message, answer)


def test_tools_and_formats_of_any_kind(echo: Client) -> None:
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for fields in (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        {"tools": [{"type": "function", "function": {"name": "f" * 65}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
        {"tools": [{"type": "function"}]},
        {"tools": [{}]},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": 5}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"response_format": {}},
        {"response_format": {"type": 5}},
    ):
        check_refused(echo.post("/v1/chat/completions", message | fields))


def test_methods_and_routes(echo: Client) -> None:
    for route in ROUTES:
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            answer = echo.request(method, route)
            assert answer.status == 405
            assert answer.error["message"] == f"{route} does not take {method}"
    for method, path in (
        ("GET", "/"),
        ("GET", "/v1"),
        ("POST", "/v1/embeddings"),
        ("GET", "/%00"),
        ("GET", "/%ff"),
    ):
        answer = echo.request(method, path)
        assert answer.status == 404
        assert answer.error["message"].startswith("there is no route")
    assert echo.request("POST", "/health").status == 405


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"]
)
def test_the_content_type_does_not_matter_or_is_refused(echo: Client, kind: str) -> None:
    answer = echo.request(
        "POST", "/v1/completions", json.dumps(RIGHT["/v1/completions"]), {"content-type": kind}
    )
    assert answer.status in (200, 400)


def test_an_unknown_name_gets_a_suggestion(echo: Client) -> None:
    answer = echo.complete("a", max_token=5)
    assert answer.error == {
        "message": "there is no parameter 'max_token'; did you mean 'max_tokens'?",
        "type": "invalid_request_error",
        "param": "max_token",
        "code": None,
    }


@pytest.mark.parametrize(
    ("route", "name", "hint"),
    [
        ("/v1/completions", "guided_json", 'use structured_outputs={"json": ...}'),
        ("/v1/chat/completions", "guided_choice", 'use structured_outputs={"choice": [...]}'),
        ("/v1/chat/completions", "functions", "use tools"),
        ("/v1/chat/completions", "enable_thinking", 'use chat_template_kwargs={"enable_thinking": ...}'),
        ("/v1/completions", "functions", ""),
        (
            "/v1/completions",
            "lora_request",
            "vLLM has it, pagedinfer does not (yet): merge the adapter into the checkpoint first, as peft's "
            "merge_and_unload does",
        ),
        ("/v1/completions", "max_new_tokens", "did you mean 'max_tokens'?"),
    ],
)
def test_names_of_other_servers(echo: Client, route: str, name: str, hint: str) -> None:
    answer = echo.post(route, RIGHT[route] | {name: None})
    assert answer.status == 400
    assert answer.error["message"].removeprefix(f"there is no parameter {name!r}") == (
        "; " + hint if hint else ""
    )


def test_a_body_that_is_not_said_to_be_json(echo: Client) -> None:
    """What `curl -d` sends. A page of another site could send it too, so it is not taken for JSON."""
    body = json.dumps(RIGHT["/v1/completions"])
    kind = {"content-type": "application/x-www-form-urlencoded"}
    answer = echo.request("POST", "/v1/completions", body, kind)
    assert answer.status == 400
    assert "send the header Content-Type: application/json" in answer.error["message"]


def test_health_without_a_body(echo: Client) -> None:
    answer = echo.request("HEAD", "/health")
    assert (answer.status, answer.body) == (200, b"")


def test_documentation_works_offline(echo: Client) -> None:
    for path in ("/docs", "/chat"):
        page = echo.get(path)
        assert page.status == 200
        assert page.headers["content-type"].startswith("text/html")
        assert b"//" not in page.body  # no address but its own
    schema = echo.get("/openapi.json").json
    assert set(schema["paths"]) >= {*ROUTES, "/v1/models", "/health", "/metrics", "/version"}
    for reference in set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(schema))):
        assert reference in schema["components"]["schemas"], reference


def test_version(echo: Client) -> None:
    from pagedinfer import __version__

    assert echo.get("/version").json == {"version": __version__}
