"""openai's own client against the server: every documented option, streamed and not.

The client builds its answers without checking them, so each is checked here against its own type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.server.rig import Client
from tests.tiny_models import byte_level_tokenizer

openai = pytest.importorskip("openai")
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say fox."}]
NO_SPACE = {str(byte_level_tokenizer().encode(character)[0]): -100 for character in " \n\r\t"}
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
            logprobs = choice["logprobs"]
            if logprobs and logprobs["token_logprobs"][:1] == [None]:  # nor the first token of an echo
                logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
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


def test_the_client_s_own_streams(client: Any) -> None:
    """`stream` puts the chunks together again, by the client's own rules: one cut off is an error."""
    pytest.importorskip("llguidance")
    options = {"model": "tiny", "messages": MESSAGES, "seed": 2}
    options |= {"extra_body": {"structured_outputs": {"regex": "[a-z ]{9}"}}}
    options |= {"logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**options) as stream:
        events = [event.type for event in stream]
        joined = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(events)
    del options["stream_options"]
    whole = client.chat.completions.create(**options)
    assert [c.message.content for c in joined.choices] == [c.message.content for c in whole.choices]
    assert [len(c.logprobs.content) for c in joined.choices] == [
        len(c.logprobs.content) for c in whole.choices
    ]
    assert joined.usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=2) as stream:
        stream.until_done()
        with pytest.raises(openai.LengthFinishReasonError):
            stream.get_final_completion()


class Animal(BaseModel):
    kind: Literal["fox", "dog"]
    age: int = Field(ge=0, le=99)


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "looks an animal up",
        "strict": True,
        "parameters": Animal.model_json_schema() | {"additionalProperties": False},
    },
}


def test_answers_as_objects(client: Any) -> None:
    """`parse` asks for a schema and reads the answer by it."""
    pytest.importorskip("llguidance")
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 3}
    answer = client.chat.completions.parse(**options, response_format=Animal)
    check(ChatCompletion, answer)
    animal = answer.choices[0].message.parsed
    assert isinstance(animal, Animal)
    with client.chat.completions.stream(**options, response_format=Animal) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == animal


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look_up"}}], ids=str
)
def test_calls_of_tools(client: Any, choice: Any) -> None:
    """The model calls one, the client reads the call and answers it, and the conversation goes on."""
    pytest.importorskip("llguidance")
    options = {"model": "tiny", "max_tokens": 300, "seed": 5, "tools": [TOOL], "parallel_tool_calls": False}
    options |= {"logit_bias": NO_SPACE}  # of which a random model likes to write much
    answer = client.chat.completions.create(**options, messages=MESSAGES, tool_choice=choice)
    check(ChatCompletion, answer)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    Animal.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    with client.chat.completions.stream(**options, messages=MESSAGES, tool_choice=choice) as stream:
        stream.until_done()
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    reply = {"role": "tool", "tool_call_id": call.id, "content": "It is a fox."}
    messages = [*MESSAGES, answer.choices[0].message, reply]
    check(ChatCompletion, client.chat.completions.create(**options | {"max_tokens": 4}, messages=messages))


@pytest.mark.parametrize("stream", [False, True])
def test_response_format(client: Any, stream: bool) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": ["fox"]}}}
    options = {"model": "tiny", "messages": MESSAGES, "response_format": form}
    answer = client.chat.completions.create(**options, stream=stream)
    if stream:
        chunks = list(answer)
        for chunk in chunks:
            check(ChatCompletionChunk, chunk)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == '"fox"'
    else:
        check(ChatCompletion, answer)
        assert answer.choices[0].message.content == '"fox"'


def test_echo(client: Any) -> None:
    options = {"model": "tiny", "prompt": "Hello", "echo": True, "logprobs": 1, "seed": 1, "max_tokens": 4}
    answer = client.completions.create(**options)
    check(Completion, answer)
    assert answer.choices[0].text.startswith("Hello")
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    rated = client.completions.create(**options | {"max_tokens": 0})
    assert rated.choices[0].text == "Hello"
    assert rated.usage.completion_tokens == 0


def test_headers_and_raw_answers(client: Any) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine"
    assert raw.parse().id == "cmpl-mine"


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
