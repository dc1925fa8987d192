"""Which parsers a request's answer needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedinfer.server.parsing.pieces import Chain, Parser, PlainParser
from pagedinfer.server.parsing.reasoning import END, ThinkParser, prompt_ends_inside
from pagedinfer.server.parsing.tool_calls import (
    BareCallParser,
    CallListParser,
    ForcedCallParser,
    TaggedCallParser,
)

TOOL_CALL_PARSERS: dict[str, Callable[[Sequence[Mapping[str, Any]]], Parser]] = {
    "hermes": TaggedCallParser,
    "qwen": TaggedCallParser,
    "llama3": BareCallParser,
}
REASONING_PARSERS = ("think",)
AUTO, NONE = "auto", "none"


def tool_call_parser_of(template: str) -> str | None:
    """The form of tool calls that a chat template asks the model for, as far as it can be told."""
    if "<tool_call>" in template:
        return "hermes"
    if "<|start_header_id|>" in template and "tools" in template:
        return "llama3"
    return None


def reasoning_parser_of(template: str) -> str | None:
    """Likewise the form of its reasoning."""
    return "think" if END in template else None


class ParserChoice:
    """What a server's model writes.

    Args:
        template: its chat template.
        tool_calls: one of TOOL_CALL_PARSERS, "auto" or "none".
        reasoning: one of REASONING_PARSERS, "auto" or "none".
    """

    def __init__(self, template: str, *, tool_calls: str = AUTO, reasoning: str = AUTO) -> None:
        self.tool_calls = tool_call_parser_of(template) if tool_calls == AUTO else tool_calls
        self.reasoning = reasoning_parser_of(template) if reasoning == AUTO else reasoning

    def parser(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        forced: str | None = None,
        required: bool = False,
        constrained: bool = False,
    ) -> Parser:
        """For one choice.

        Args:
            prompt: as text.
            tools: that the model may call.
            forced: the function that it must call.
            required: it must call one.
            constrained: a grammar rules the text from its first token, and leaves no room for reasoning.
        """
        if forced is not None:
            return ForcedCallParser(forced)
        if required:
            return CallListParser()
        parser: Parser = PlainParser()
        if tools and not constrained and self.tool_calls in TOOL_CALL_PARSERS:
            parser = TOOL_CALL_PARSERS[self.tool_calls](tools)
        if self.reasoning == "think" and not constrained:
            thoughts = ThinkParser(inside=prompt_ends_inside(prompt))
            parser = thoughts if isinstance(parser, PlainParser) else Chain(thoughts, parser)
        return parser
