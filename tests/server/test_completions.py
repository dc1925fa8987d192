"""/v1/completions: forms of prompts, streams, stops, texts, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagedinfer import LLM, SamplingParams
from tests.server.rig import TINY_FLAGS, Client, ServerThread
from tests.tiny_models import byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text))


def bytes_ids(text: str) -> list[int]:
    """One token a byte."""
    found: list[int] = []
    for byte in text.encode():
        [token] = TOKENIZER.convert_tokens_to_ids([_BYTE_TOKENS[byte]])
        found.append(token)
    return found


def _byte_tokens() -> dict[int, str]:
    from pagedinfer.server.token_bytes import _BYTE_OF

    return {byte: character for character, byte in _BYTE_OF.items()}


_BYTE_TOKENS = _byte_tokens()


def joined(events: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def test_it_gives_what_llm_gives(server: Client, model: str) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("Hello", GREEDY),
        ("The quick", {"seed": 5, "temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01}),
        ("中", {"seed": 9, "n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 4}),
        ("fox", {"seed": 1, "logit_bias": {"70": 5}, "frequency_penalty": 0.3, "stop_token_ids": [70]}),
        ("dog", {"seed": 2, "allowed_token_ids": [70, 71, 72], "bad_words": ["FF"], "max_tokens": 20}),
    ]
    with LLM(model, device="cpu", num_gpu_blocks_override=256, max_num_seqs=16) as llm:
        for prompt, fields in requests:
            [right] = llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)
            body = server.complete(prompt, **fields).json
            events = server.stream("/v1/completions", {"prompt": prompt} | fields)
            for i, choice in enumerate(right.outputs):
                assert body["choices"][i]["text"] == choice.text == joined(events, i)
                assert body["choices"][i]["finish_reason"] == choice.finish_reason
            num_tokens = sum(len(choice.token_ids) for choice in right.outputs)
            assert body["usage"]["completion_tokens"] == num_tokens
            assert body["usage"]["prompt_tokens"] == len(right.prompt_token_ids)
            assert body["usage"]["total_tokens"] == num_tokens + len(right.prompt_token_ids)


def test_prompts_in_every_form(server: Client) -> None:
    alone = [server.text(text, **GREEDY) for text in ("Hello", "the dog")]
    assert server.text(ids("Hello"), **GREEDY) == alone[0]
    for prompts in (["Hello", "the dog"], [ids("Hello"), ids("the dog")]):
        choices = server.complete(prompts, **GREEDY).json["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert [choice["text"] for choice in choices] == alone
        events = server.stream("/v1/completions", {"prompt": prompts} | GREEDY)
        assert [joined(events, 0), joined(events, 1)] == alone


def test_several_prompts_with_several_choices(echo: Client) -> None:
    body = echo.complete(["ab", "cd"], n=2, max_tokens=4, echo=True).json
    assert [c["text"] for c in body["choices"]] == ["ababab", "ababab", "cdcdcd", "cdcdcd"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[5], []], None, 5, {}, [None], ["a", 5]])
def test_empty_and_malformed_prompts(server: Client, prompt: Any) -> None:
    """vllm#7283, vllm#7632."""
    answer = server.complete(prompt)
    assert answer.status == 400
    assert "prompt" in answer.error["message"]
    assert server.text([5], **GREEDY)


def test_token_ids_and_texts_in_one_list(server: Client) -> None:
    assert len(server.complete([[5], "a"]).json["choices"]) == 2


def test_a_prompt_of_another_type_is_named(server: Client) -> None:
    assert server.complete(["a", 5.5]).error["message"].endswith("got 5.5")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"temperature": -0.1}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 30, "max_tokens": 10}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"stop_token_ids": ["abc"]}, "stop_token_ids"),
        ({"logit_bias": {"320": 1}, "min_tokens": 1}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**63): 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": [5, "abc"]}, "prompt"),
        ({"priority": 5}, "priority"),
        ({"model": "gpt"}, "model"),
        ({"temprature": 0.5}, "temprature"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_is_refused_names_the_field(server: Client, fields: dict[str, Any], param: str) -> None:
    """TGI#2222, vllm#13175, vllm PR#16529, vllm#54195: 400 before anything runs."""
    answer = server.complete(**{"prompt": "a"} | fields)
    assert answer.status == (404 if param == "model" else 400)
    assert answer.error["param"] in (param, None)
    assert param.replace("temprature", "did you mean 'temperature'") in answer.error["message"]


def test_a_bad_request_beside_a_good_one_changes_nothing(server: Client) -> None:
    """vllm PR#16529."""
    right = server.text("Hello", **GREEDY)
    with server.open_stream("/v1/completions", {"prompt": "the", "max_tokens": 400, "ignore_eos": True}):
        for token in (320, -1, 2**63, "abc"):
            for fields in ({"stop_token_ids": [token]}, {"prompt": [5, token]}):
                assert server.complete(**{"prompt": "a", "min_tokens": 1} | fields).status == 400
            assert server.complete("a", logit_bias={str(token): 1.0}, min_tokens=1).status == 400
        assert server.text("Hello", **GREEDY) == right


def test_top_p_of_one_is_no_filter_and_a_tiny_one_is_greedy(server: Client) -> None:
    """TGI#2222, TGI PR#544."""
    sampled = {"seed": 3, "max_tokens": 12}
    assert server.text("Hello", top_p=1.0, **sampled) == server.text("Hello", **sampled)
    assert server.text("Hello", top_p=1e-10, **GREEDY | {"temperature": 1}) == server.text("Hello", **GREEDY)
    body = '{"prompt": "a", "top_p": NaN}'
    answer = server.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert answer.status == 400
    assert answer.error["param"] == "top_p"


def test_the_length_of_the_context(server: Client) -> None:
    """vllm#16445: as long as the context less one gives one token; no limit is ever negative."""
    [choice] = server.complete([5] * 511).json["choices"]
    assert choice["finish_reason"] == "length"
    for length in (512, 513):
        answer = server.complete([5] * length)
        assert answer.status == 400
        assert str(length) in answer.error["message"]
        assert "max_model_len=512" in answer.error["message"]
        assert answer.error["code"] == "context_length_exceeded"
    for limit in (10**30, 10**400):  # the second is more than any float
        [choice] = server.complete([5] * 500, max_tokens=limit, ignore_eos=True).json["choices"]
        assert choice["finish_reason"] == "length"


# ---- stops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["two", "eef", "etwothreef", "rone"])
def test_a_stop_text_inside_tokens(echo: Client, stop: str) -> None:
    """vllm#3572, TGI#1039. The prompt has it too, which does not matter."""
    script = "onetwothreefour"
    body = {"prompt": script, "stop": stop, "max_tokens": 60}
    [choice] = echo.complete(**body).json["choices"]
    assert choice["text"] == joined(echo.stream("/v1/completions", body))
    assert choice["text"] == (2 * script)[: (2 * script).index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("script", "max_tokens", "text", "reason"),
    [
        ("say HALT# now", 100, "say ", "stop"),
        ("say HALT! now", 13, "say HALT! now", "length"),
        ("say HALT# now", 8, "say HALT", "length"),
    ],
)
def test_a_stream_never_takes_text_back(
    echo: Client, script: str, max_tokens: int, text: str, reason: str
) -> None:
    """vllm#3574, vllm#11089: the beginning of a stop text is held until it is known to be none."""
    body = {"prompt": bytes_ids(script), "stop": "HALT#", "max_tokens": max_tokens}
    [choice] = echo.complete(**body).json["choices"]
    events = echo.stream("/v1/completions", body)
    assert choice["text"] == joined(events) == text
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == reason
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)


def test_stop_tokens(echo: Client) -> None:
    """vllm PR#14624, vllm#2538, TGI#1724."""
    script, token = ids("abcd"), ids("c")[0]
    [choice] = echo.complete(script, stop_token_ids=[token]).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", token)
    included = echo.complete(script, stop_token_ids=[token], include_stop_str_in_output=True)
    assert included.json["choices"][0]["text"] == "abc"
    eos = TOKENIZER.eos_token_id
    [choice] = echo.complete([*script, eos], max_tokens=5).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abcd", "stop", None)
    events = echo.stream("/v1/completions", {"prompt": script, "stop_token_ids": [token]})
    assert events[-1]["choices"][0]["stop_reason"] == token


# ---- characters over several tokens ----------------------------------------------------------------


class Tokens(NamedTuple):
    """A scripted server, and its tokenizer's token for each byte."""

    server: Client
    of_byte: Callable[[int], int]

    def of(self, text: str) -> list[int]:
        """One token a byte."""
        return [self.of_byte(byte) for byte in text.encode()]


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def tokens(
    request: pytest.FixtureRequest, echo: Client, model: str, tmp_path_factory: Any
) -> Iterator[Tokens]:
    if request.param == "byte-level":
        yield Tokens(echo, ids_of_byte)
        return
    folder = tmp_path_factory.mktemp("byte_fallback")
    tokenizer = byte_fallback_tokenizer()
    tokenizer.save_pretrained(folder)
    config = json.loads((Path(model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(tokenizer)}))
    with ServerThread(str(folder), scripted=True) as server:
        yield Tokens(server, lambda byte: int(tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>"])[0]))


@pytest.mark.parametrize("text", ["ď", "中文", "🔥", "👨‍👩‍👧‍👦", "ภาษาไทย", "aďb中c🔥"])
def test_no_delta_holds_half_a_character(tokens: Tokens, text: str) -> None:
    """vllm#8627, exo PR#1691."""
    script = tokens.of(text)
    body = {"prompt": script, "max_tokens": 2 * len(script)}
    events = tokens.server.stream("/v1/completions", body)
    assert joined(events) == tokens.server.text(**body) == 2 * text
    assert all("\N{REPLACEMENT CHARACTER}" not in event["choices"][0]["text"] for event in events)


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tokens: Tokens) -> None:
    """vllm#48853."""
    script = tokens.of("Hi 中")[:-1]
    body = {"prompt": script, "max_tokens": 2}
    assert joined(tokens.server.stream("/v1/completions", body)) == tokens.server.text(**body) == "Hi"


def test_a_character_that_is_cut_off(tokens: Tokens) -> None:
    """mlx-vlm#1771."""
    for script, count in ((tokens.of("🔥"), 2), ([tokens.of_byte(0xFF)], 1)):
        body = {"prompt": script, "max_tokens": count}
        [choice] = tokens.server.complete(**body).json["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["text"] == joined(tokens.server.stream("/v1/completions", body))
        assert "\N{REPLACEMENT CHARACTER}" in choice["text"]


def ids_of_byte(byte: int) -> int:
    token: int = TOKENIZER.convert_tokens_to_ids(_BYTE_TOKENS[byte])
    return token


# ---- echo and log-probabilities --------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("prompt", ["The fox 中🔥", bytes_ids("ab 中 é")], ids=["text", "tokens"])
def test_echo_with_logprobs(server: Client, max_tokens: int, prompt: Any) -> None:
    """vllm#5334, vllm#27477: tokens join to the text, and the offsets point into it."""
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 4}
    answer = server.complete(**body)
    assert answer.status == 200, answer.body
    [choice] = answer.json["choices"]
    events = server.stream("/v1/completions", body)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    whole = choice["logprobs"]
    assert {key: [x for part in streamed for x in part[key]] for key in whole} == whole
    assert joined(events) == choice["text"]
    num_prompt = answer.json["usage"]["prompt_tokens"]
    assert len(whole["tokens"]) == num_prompt + max_tokens
    assert answer.json["usage"]["completion_tokens"] == max_tokens
    assert "".join(whole["tokens"]) == choice["text"]
    assert choice["text"].startswith("The fox 中🔥" if isinstance(prompt, str) else "ab 中 é")
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert whole["token_logprobs"][0] is None
    assert whole["top_logprobs"][0] is None
    assert all(value < 0 for value in whole["token_logprobs"][1:])
    assert all(1 <= len(top) <= 2 for top in whole["top_logprobs"][1:])


def test_choices_that_begin_later_have_the_prompt_rated_too(server: Client) -> None:
    """More of them than can run at once: the prompt's log-probabilities come with the first one's tokens."""
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 2, "n": 20, "max_tokens": 2}
    firsts: dict[int, Any] = {}
    for event in server.stream("/v1/completions", body):
        for choice in event["choices"]:
            firsts.setdefault(choice["index"], choice)
    assert len(firsts) == 20
    whole = server.complete(**body).json["choices"]
    num_tokens = len(ids("abc"))
    for choice in [*firsts.values(), *whole]:
        assert choice["logprobs"]["tokens"][:num_tokens] == whole[0]["logprobs"]["tokens"][:num_tokens]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["prompt_logprobs"][0] is None
        assert all(len(rated) in (2, 3) for rated in choice["prompt_logprobs"][1:])
        assert len(choice["prompt_logprobs"]) == num_tokens


def test_echo_without_logprobs(echo: Client) -> None:
    assert echo.text("abc", echo=True, max_tokens=3) == "abcabc"
    assert (
        joined(echo.stream("/v1/completions", {"prompt": "abc", "echo": True, "max_tokens": 3})) == "abcabc"
    )
    assert echo.text("abc", echo=True, max_tokens=0) == "abc"


def test_a_best_of_that_changes_nothing(echo: Client) -> None:
    assert len(echo.complete("abc", best_of=1).json["choices"]) == 1
    assert len(echo.complete("abc", n=2, best_of=2).json["choices"]) == 2
    assert echo.complete("abc", n=2, best_of=3).status == 400


def test_what_vllm_adds(server: Client) -> None:
    answer = server.complete("abc", prompt_logprobs=1, return_token_ids=True, request_id="mine", **GREEDY)
    [choice] = answer.json["choices"]
    assert answer.json["id"] == "cmpl-mine"
    assert choice["prompt_token_ids"] == ids("abc")
    assert len(choice["token_ids"]) == 8
    assert choice["prompt_logprobs"][0] is None
    assert str(ids("abc")[1]) in choice["prompt_logprobs"][1]
    plain = server.complete("abc", **GREEDY).json["choices"][0]
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & plain.keys()


# ---- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_of_a_stream(echo: Client, options: dict[str, bool] | None) -> None:
    """vllm PR#36379, kubeai#283."""
    for path, body in (
        ("/v1/completions", {"prompt": "abc", "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}),
    ):
        events = echo.stream(path, body | {"stream_options": options})
        if options != {"include_usage": True}:
            assert all("usage" not in event and event["choices"] for event in events)
            continue
        *chunks, last = events
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == echo.post(path, body).json["usage"]
        assert last["usage"]["completion_tokens"] == 5


def test_stream_options_without_a_stream(echo: Client) -> None:
    answer = echo.complete("abc", stream_options={"include_usage": True})
    assert answer.status == 400
    assert answer.error["param"] == "stream_options"


def test_usage_on_every_chunk(echo: Client) -> None:
    events = echo.stream(
        "/v1/completions",
        {"prompt": "abc", "max_tokens": 5, "stream_options": {"continuous_usage_stats": True}},
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_cached_tokens_are_reported(server: Client) -> None:
    prompt = [7 + i for i in range(40)]
    server.complete(prompt)
    usage = server.complete(prompt).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


def test_cache_salt_separates(server: Client) -> None:
    prompt = [9 + i for i in range(40)]
    for salt in ("one", "two"):
        usage = server.complete(prompt, cache_salt=salt).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_flags_of_the_rig_are_flags_of_serve() -> None:
    from pagedinfer.cli.main import parser_of

    assert parser_of("serve").parse_args(["m", *TINY_FLAGS]).max_num_seqs == 16
