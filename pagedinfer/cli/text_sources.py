"""Where `chat` and `complete` get their text from: a server, or a model in this process."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pagedinfer.cli.engine_arguments import add_engine_arguments, engine_config
from pagedinfer.cli.http_client import HttpClient, api_key
from pagedinfer.cli.parser import human_integer

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser
    from pagedinfer.engine.input_processor import Prompt

Message = Mapping[str, str]
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")


class TextSource(Protocol):
    """Answers, piece by piece."""

    def chat(self, messages: Sequence[Message]) -> Iterator[str]: ...
    def complete(self, prompt: str) -> Iterator[str]: ...
    def close(self) -> None: ...


def add_source_arguments(parser: Parser) -> None:
    """Adds the flags that say where text comes from, and how it is drawn."""
    parser.add_config_argument()
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="of the server to ask, if no MODEL is given (default: http://127.0.0.1:8000)",
    )
    group.add_argument("--api-key", help="for the server; or in PAGEDINFER_API_KEY")
    group.add_argument("--model-name", metavar="NAME", help="one of the server's models (default: its first)")
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, metavar="X", help="0 to 2")
    group.add_argument("--top-p", type=float, metavar="X", help="above 0, at most 1")
    group.add_argument("--top-k", type=human_integer, metavar="N", help="0: off")
    group.add_argument("--max-tokens", type=human_integer, metavar="N", help="of an answer")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="makes the answers reproducible")
    add_engine_arguments(parser)


def text_source(arguments: argparse.Namespace) -> TextSource:
    """What the flags ask for.

    Raises:
        ValueError, PagedinferError: the model cannot be loaded, or the server not be reached.
    """
    values = vars(arguments) | {"seed": arguments.sampling_seed}
    sampling = {name: values[name] for name in _SAMPLING if values[name] is not None}
    if arguments.model:
        return _LocalSource(arguments, sampling)
    return _ServerSource(arguments, sampling)


class _ServerSource:
    def __init__(self, arguments: argparse.Namespace, sampling: dict[str, Any]) -> None:
        self._client = HttpClient(arguments.url, api_key(arguments.api_key))
        self._body = {"model": arguments.model_name or self._client.first_model(), **sampling}

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        body = self._body | {"messages": list(messages)}
        for event in self._client.events("/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        for event in self._client.events("/v1/completions", self._body | {"prompt": prompt}):
            for choice in event.get("choices", ()):
                yield choice["text"]

    def close(self) -> None:
        pass


class _LocalSource:
    def __init__(self, arguments: argparse.Namespace, sampling: dict[str, Any]) -> None:
        from pagedinfer.engine.engine import LLMEngine

        self._engine = LLMEngine(engine_config(arguments))
        self._sampling = sampling
        self._names = itertools.count()

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        from pagedinfer.chat_template import ChatTemplate

        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer: do without --skip-tokenizer-init")
        text, token_ids = ChatTemplate(tokenizer, self._engine.chat_template).encode(messages)
        defaults: dict[str, Any] = {"max_tokens": None}  # to the end of the context
        return self._generate({"prompt": text, "prompt_token_ids": token_ids}, defaults)

    def complete(self, prompt: str) -> Iterator[str]:
        return self._generate(prompt, {})

    def _generate(self, prompt: Prompt, defaults: dict[str, Any]) -> Iterator[str]:
        from dataclasses import replace

        from pagedinfer.sampling_params import RequestOutputKind

        engine, name = self._engine, str(next(self._names))
        params = replace(engine.default_sampling_params, **defaults | self._sampling)
        engine.add_request(name, prompt, params, output_kind=RequestOutputKind.DELTA)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    yield "".join(choice.text for choice in output.outputs)
        finally:
            engine.abort_request(name)

    def close(self) -> None:
        self._engine.close()
