"""openai's own client against the server: every documented option, streamed and not.

The client builds its answers without checking them, so each is checked here against its own type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.rig import Client

openai = pytest.importorskip("openai")
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say fox."}]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1.3, "top_p": 0.9, "seed": 11},
    {"n": 3, "seed": 1},
    {"stop": "e"},
    {"stop": ["e", "a", "o"], "seed": 3},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"logit_bias": {"70": 20, "71": -100}},
    {"user": "someone"},
    {
        "extra_body": {
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 3,
        }
    },
    {"extra_body": {"stop_token_ids": [70, 71], "include_stop_str_in_output": True}},
    {"extra_body": {"allowed_token_ids": [70, 71, 72], "bad_words": ["fox"], "skip_special_tokens": False}},
    {"extra_body": {"truncate_prompt_tokens": 4, "cache_salt": "s", "priority": 0, "prompt_logprobs": 1}},
]


@pytest.fixture(scope="module")
def client(server: Client) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def check(kind: Any, answer: Any) -> None:
    given = answer.model_dump()
    if kind is Completion:  # whose type has no chunk before the last, though OpenAI sends them
        for choice in given["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    kind.model_validate(given, strict=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_completions(client: Any, options: dict[str, Any]) -> None:
    options = {"model": "tiny", "prompt": "Hello there", "max_tokens": 8, "logprobs": 2} | options
    answer = client.completions.create(**options)
    check(Completion, answer)
    assert len(answer.choices) == options.get("n", 1)
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == sum(len(c.logprobs.tokens) for c in answer.choices)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        check(Completion, chunk)
    texts: dict[int, str] = {}
    reasons = {}
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    assert set(reasons.values()) <= {"stop", "length"}
    if "seed" in options or options.get("temperature") == 0:
        assert [texts[c.index] for c in answer.choices] == [c.text for c in answer.choices]
        assert chunks[-1].usage.completion_tokens == usage.completion_tokens


@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS,
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 3},
        {"max_completion_tokens": 4},
        {"response_format": {"type": "text"}},
        {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
        {"reasoning_effort": "low"},
        {"modalities": ["text"]},
    ],
    ids=str,
)
def test_chat(client: Any, options: dict[str, Any]) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8} | options
    answer = client.chat.completions.create(**options)
    check(ChatCompletion, answer)
    assert len(answer.choices) == options.get("n", 1)
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens <= options.get("max_completion_tokens", 8) * options.get("n", 1)
    if options.get("logprobs"):
        entries = answer.choices[0].logprobs.content
        assert len(entries) == usage.completion_tokens
        assert all(len(entry.top_logprobs) == options.get("top_logprobs", 0) for entry in entries)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    texts: dict[int, str] = {}
    for chunk in chunks:
        check(ChatCompletionChunk, chunk)
        for choice in chunk.choices:
            if choice.index not in texts:
                assert choice.delta.role == "assistant"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    if "seed" in options or options.get("temperature") == 0:
        assert [texts[c.index] for c in answer.choices] == [c.message.content for c in answer.choices]
        assert chunks[-1].usage.completion_tokens == usage.completion_tokens


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_client_s_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be a number") as error:
        client.completions.create(model="tiny", prompt="a", temperature=3)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-17", prompt="a")
    assert error.value.code == "model_not_found"


def test_the_async_client(server: Client) -> None:
    import asyncio

    async def run() -> list[str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:

            async def ask() -> str:
                stream = await client.completions.create(
                    model="tiny", prompt="Hello", temperature=0, max_tokens=10, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*(ask() for _ in range(20))))

    assert len(set(asyncio.run(run()))) == 1
