"""/v1/chat/completions: messages, templates, defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.conftest import CHAT_TEMPLATE
from tests.server.rig import Client, ServerThread

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def chat(server: Client, content: Any, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}]} | fields
    return server.post("/v1/chat/completions", body)


def test_a_chat_has_one_bos_and_the_template_s_tokens(server: Client, model: str) -> None:
    """vllm#16853, vllm#55197."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "Hi 中"}]
    right = tokenizer.apply_chat_template(
        messages, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    assert right.count(tokenizer.bos_token_id) == 1
    answer = chat(server, "Hi 中", return_token_ids=True, **GREEDY)
    assert answer.json["prompt_token_ids"] == right
    assert server.post("/tokenize", {"messages": messages}).json["tokens"] == right
    completion = server.complete("Hi", return_token_ids=True).json["choices"][0]
    assert completion["prompt_token_ids"] == tokenizer.encode("Hi")
    assert server.text(right, **GREEDY) == answer.json["choices"][0]["message"]["content"]


def test_content_in_parts(echo: Client) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    assert chat(echo, parts, **GREEDY).status == 200
    answer = chat(echo, [{"type": "image_url", "image_url": {"url": "http://x"}}])
    assert answer.status == 400
    assert "parts of type 'text' only" in answer.error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [5],
        None,
    ],
)
def test_malformed_messages(server: Client, messages: Any) -> None:
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.status == 400
    assert "message" in answer.error["message"]


def test_continuing_a_message(echo: Client) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": messages, "continue_final_message": True}
        assert echo.post(path, body).status == 200
        assert echo.post(path, body | {"add_generation_prompt": True}).status == 400


def test_without_a_template(model: str) -> None:
    """vllm#39279, vllm#18140."""
    with ServerThread(model, scripted=True) as server:
        answer = chat(server, "Hi")
        assert answer.status == 400
        assert "--chat-template" in answer.error["message"]
        assert server.complete("Hi").status == 200
        assert server.complete("Hi").json["model"] == model


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": 5},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "other"}]},
        {"tools": [5]},
        {"tool_choice": "auto"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": 1},
        {"response_format": {"type": "yaml"}},
        {"response_format": "json"},
        {"modalities": ["audio"]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]},
    ],
    ids=str,
)
def test_what_is_refused(server: Client, fields: dict[str, Any]) -> None:
    """GHSA-6fvq-23cw-5628, CVE-2025-62426, CVE-2025-48944."""
    answer = chat(server, "Hi", **fields)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"stop": []},
        {"stop": None, "logit_bias": {}, "stop_token_ids": [], "bad_words": []},
        {"tools": []},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"temperature": 1, "top_p": 1, "presence_penalty": 0, "top_k": -1, "min_p": 0},
        {"max_tokens": None, "max_completion_tokens": 3},
        {"response_format": None, "stream_options": None, "metadata": {}},
        {"messages": [{"role": "user", "content": "a", "name": "ann"}]},
        {"messages": [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}]},
    ],
    ids=str,
)
def test_what_clients_send_without_meaning_it(echo: Client, fields: dict[str, Any]) -> None:
    answer = chat(echo, "abc", **{"max_tokens": 3} | fields)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["message"]["content"]


def test_a_template_cannot_leave_its_sandbox(model: str) -> None:
    """litellm#2949."""
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with ServerThread(model, chat_template=template, scripted=True) as server:
        answer = chat(server, "Hi")
        assert answer.status == 400
        assert "template failed" in answer.error["message"]
        assert server.get("/health").status == 200


def test_defaults_of_the_model_and_what_wins(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """vllm#15241: what a request says wins, zero included; the log says what was changed."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    settings = {"temperature": 0.001, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with ServerThread(str(folder)) as server:
        greedy = server.complete("Hello", temperature=0).json
        assert greedy["usage"]["completion_tokens"] == 5
        assert server.text("Hello") == greedy["choices"][0]["text"]
        assert len({server.text("Hello", temperature=1.0, seed=seed) for seed in range(5)}) == 5
        assert server.complete("Hello", max_tokens=2).json["usage"]["completion_tokens"] == 2
    assert "temperature=0.001" in capfd.readouterr().err  # the engine's process says so


def test_tokenize_and_detokenize(server: Client) -> None:
    answer = server.post("/tokenize", {"prompt": "the fox 中", "return_token_strs": True}).json
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": "the fox 中"}
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, {"prompt": "\ud800"}):
        assert server.post("/tokenize", body).status == 400
    for tokens in ([-1], [320], [2**70], ["a"], "abc", None):
        assert server.post("/detokenize", {"tokens": tokens}).status == 400
