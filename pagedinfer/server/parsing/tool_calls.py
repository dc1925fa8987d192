"""Tool calls in the forms in which models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pagedinfer.engine.stop_strings import could_begin
from pagedinfer.server.parsing.pieces import Call, Content, Piece

_BEGIN, _END = "<tool_call>", "</tool_call>"


class TaggedCallParser:
    """<tool_call>...</tool_call>, as Hermes 2 and 3, Qwen2.5, Qwen3 and Qwen3-Coder write it.

    Within the tags is a JSON object with a name and arguments, or Qwen3-Coder's form:

        <function=NAME><parameter=KEY>VALUE</parameter>...</function>

    A call is given when it is complete. What is between tags and no call is part of the answer.

    Args:
        tools: of the request. Their schemas say which values of Qwen3-Coder's form are text.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = dict(map(_name_and_schema, tools))
        self._held = ""
        self._inside = False
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while True:
            mark = _END if self._inside else _BEGIN
            at = self._held.find(mark)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._inside:
                call = self._parse(before)
                found.append(Content(f"{_BEGIN}{before}{_END}") if call is None else call)
                self._after_call = call is not None
            else:
                # Templates put line breaks before a call, which say nothing.
                found += self._content(before.rstrip())
            self._inside = not self._inside
        if not self._inside:
            whole = self._held[: len(self._held) - could_begin(self._held, (_BEGIN,))]
            shown = whole.rstrip()  # space may be that before a call
            self._held = self._held[len(shown) :]
            found += self._content(shown)
        return found

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._inside:
            call = self._parse(held)  # a stop token may have stood for the closing tag
            return [Content(f"{_BEGIN}{held}") if call is None else call]
        return self._content(held)

    def _content(self, text: str) -> list[Piece]:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        return [Content(text)]

    def _parse(self, text: str) -> Call | None:
        if "<function=" in text:
            return self._parse_parameters(text)
        return call_of(_load(text), self._schemas, any_name=True)

    def _parse_parameters(self, text: str) -> Call | None:
        function = re.search(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", text, re.DOTALL)
        if function is None:
            return None
        name = function[1].strip()
        properties = self._schemas.get(name, {}).get("properties", {})
        arguments = {}
        for key, value in re.findall(
            r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", function[2], re.DOTALL
        ):
            schema = properties.get(key.strip(), {})
            arguments[key.strip()] = _value(value, schema if isinstance(schema, Mapping) else {})
        return Call(name, json.dumps(arguments, ensure_ascii=False))


class BareCallParser:
    """JSON objects with a name and parameters, and nothing else, as Llama 3.1 to 3.3 write them.

    Several are separated by semicolons or space, and <|python_tag|> may come first. Text of any other kind
    is the answer, and so is an object that names no tool of the request.

    Args:
        tools: of the request.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = dict(map(_name_and_schema, tools))
        self._held = ""
        self._is_answer = False
        self._any_call = False
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        if self._is_answer:
            return self._give_up()
        found: list[Piece] = []
        while True:
            begun = self._held.lstrip(" \n\t\r;" if self._any_call else " \n\t\r")
            begun = begun.removeprefix(self._TAG).lstrip()
            if not begun or self._TAG.startswith(begun):
                return found
            if not begun.startswith("{"):
                return found + self._give_up()
            if "}" not in text:
                return found
            try:
                value, end = self._decoder.raw_decode(begun)
            except (ValueError, RecursionError):
                return found
            call = call_of(value, self._schemas, any_name=False)
            if call is None:
                return found + self._give_up()
            found.append(call)
            self._any_call = True
            self._held = begun[end:]

    def finish(self) -> list[Piece]:
        if self._any_call and not self._held.strip(" \n\t\r;"):
            return []
        return self._give_up()

    def _give_up(self) -> list[Piece]:
        held, self._held = self._held, ""
        self._is_answer = True
        return [Content(held)] if held else []


class ForcedCallParser:
    """The text is the arguments of one function: the request named it, and a grammar saw to the form."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        return [Call(self._name, self._text.strip())]


class CallListParser:
    """The text is a JSON list of calls, by a grammar: the request asked for at least one."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        calls = _load(self._text)
        found = [call_of(value, {}, any_name=True) for value in calls] if isinstance(calls, list) else []
        if not found or None in found:  # cut off by max_tokens
            return [Content(self._text)] if self._text else []
        return [call for call in found if call is not None]


def call_of(value: Any, names: Collection[str], *, any_name: bool) -> Call | None:
    """The call that a JSON value is; None if it is none, or one of a function that there is not."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    if not any_name and value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON
        arguments = _load(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _name_and_schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = tool["function"]
    return function["name"], function.get("parameters") or {}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of a parameter that is written without quotes, by its schema."""
    kinds = schema.get("type")
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
