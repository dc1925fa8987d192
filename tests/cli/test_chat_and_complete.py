"""chat and complete: against a server, and with a model in this process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from pagedinfer import LLM, SamplingParams
from pagedinfer.cli.http_client import HttpClient
from pagedinfer.cli.main import main

pytest.importorskip("fastapi")
from tests.server.rig import ServerThread

TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"
LOCAL = ["--device", "cpu", "--num-gpu-blocks-override", "64", "--temperature", "0"]


@pytest.fixture(scope="module")
def url(tiny_llama: Any) -> Iterator[str]:
    settings = {"api_keys": ("k",)}
    with ServerThread(tiny_llama.path, settings=settings, scripted=True, chat_template=TEMPLATE) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_complete_by_a_server(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["complete", "--url", url, "--max-tokens", "5", "--api-key", "k"]
    assert main([*flags, "--prompt", "abc"]) == 0
    assert capsys.readouterr().out == "abcab\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("xyz"))
    assert main([*flags, "--url", f"{url}/v1"]) == 0
    assert capsys.readouterr().out == "xyzxy\n"


def test_chat_remembers_the_conversation(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDINFER_API_KEY", "k")
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\ncd\n/new\nef\n/quit\ngh\n"))
    assert main(["chat", "--url", url, "--max-tokens", "6", "--system", "s"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "s;ab;s\ns;ab;s\ns;ef;s\n"
    assert captured.err == ""  # nobody types: no prompt
    assert main(["chat", "--url", url, "--max-tokens", "3", "-m", "xyz"]) == 0
    assert capsys.readouterr().out == "xyz\n"


def test_errors_are_one_line(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDINFER_API_KEY", raising=False)
    assert main(["complete", "--url", url, "-p", "x"]) == 1
    assert capsys.readouterr().err.startswith("pagedinfer: error: 401: a valid API key is needed")
    assert main(["complete", "--url", url, "--api-key", "k", "--temperature", "9", "-p", "x"]) == 1
    assert "temperature must be" in capsys.readouterr().err
    assert main(["complete", "--url", "http://127.0.0.1:1", "-p", "x"]) == 1
    assert "cannot be talked to" in capsys.readouterr().err
    assert main(["complete", "--url", "ftp://x", "-p", "x"]) == 1
    assert "a URL such as" in capsys.readouterr().err
    assert main(["complete", "--url", "http://x:99999", "-p", "x"]) == 1
    assert "is needed, got 'http://x:99999': Port out of range" in capsys.readouterr().err


@pytest.mark.usefixtures("one_thread")
def test_in_this_process(tiny_llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=64) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        [output] = llm.generate("Hello", greedy, use_tqdm=False)
        [answer] = llm.chat(
            [{"role": "user", "content": "Hi"}], greedy, use_tqdm=False, chat_template=TEMPLATE
        )
    assert main(["complete", tiny_llama.path, *LOCAL, "--max-tokens", "8", "-p", "Hello"]) == 0
    assert capsys.readouterr().out == output.outputs[0].text + "\n"
    flags = ["--chat-template", TEMPLATE, "--max-tokens", "8", "-m", "Hi"]
    assert main(["chat", tiny_llama.path, *LOCAL, *flags]) == 0
    assert capsys.readouterr().out == answer.outputs[0].text + "\n"


def test_leaving_a_stream_ends_its_request(url: str) -> None:
    client = HttpClient(url, "k")
    events = client.events("/v1/completions", {"prompt": "abc", "max_tokens": 400, "cache_salt": "slow:0.01"})
    assert next(events)["choices"]
    events.close()  # type: ignore[attr-defined]
    assert client.first_model()
