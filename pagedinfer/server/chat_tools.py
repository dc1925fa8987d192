"""What a chat request says about tools, checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pagedinfer.server.api_errors import invalid
from pagedinfer.server.request_models import ChatBody


class ToolUse:
    """The tools of a request, and which of them the model may or must call.

    Raises:
        ApiError: malformed tools, or a choice that is none of them.
    """

    def __init__(self, body: ChatBody) -> None:
        self.tools = check_tools(body.tools) or []
        names = [tool["function"]["name"] for tool in self.tools]
        choice = body.tool_choice
        self.forced: str | None = None
        """The function that must be called."""
        self.required = choice == "required"
        """Whether at least one must be."""
        self.parallel = body.parallel_tool_calls is not False
        if isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if choice.get("type") != "function" or not isinstance(name, str):
                raise invalid(
                    'tool_choice must be "none", "auto", "required" or a function, as '
                    f'{{"type": "function", "function": {{"name": "..."}}}}, got {choice!r:.80}',
                    param="tool_choice",
                )
            if name not in names:
                raise invalid(f"tool_choice names {name[:100]!r}, which is not in tools", param="tool_choice")
            self.forced = name
        if choice not in (None, "none") and not self.tools:
            raise invalid("tool_choice needs tools", param="tool_choice")
        self.callable = [] if choice == "none" else self.tools
        """Those that the model may call."""

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """What the template is told."""
        return self.callable or None

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of an answer that must be a call, or calls; None if it need not be."""
        if self.forced is not None:
            [tool] = [tool for tool in self.tools if tool["function"]["name"] == self.forced]
            return parameters_of(tool)
        if not self.required:
            return None
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": parameters_of(tool),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for tool in self.tools
        ]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            schema["maxItems"] = 1
        return schema


def check_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools; None if there are none.

    Raises:
        ApiError: one of them is malformed, or two have one name.
    """
    checked = [_check(i, tool) for i, tool in enumerate(tools or ())]
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) < len(names):
        [(name, count)] = Counter(names).most_common(1)
        raise invalid(f"tools must have different names, got {name!r} {count} times", param="tools")
    return checked or None


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments; an empty object, if it has none."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return tool["function"].get("parameters") or nothing


def _check(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise invalid(
            f'tool {index} must be a function, as {{"type": "function", "function": {{...}}}}', param="tools"
        )
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name):
        raise invalid(
            f"tool {index} must have a name of at most 64 letters, digits, '_', '.' and '-', "
            f"got {name!r:.80}",
            param="tools",
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise invalid(
            f"the parameters of tool {index} must be a JSON schema, an object, "
            f"got {function['parameters']!r:.40}",
            param="tools",
        )
    if not isinstance(function.get("description"), str | None):
        raise invalid(
            f"the description of tool {index} must be a text, got {function['description']!r:.40}",
            param="tools",
        )
    return tool
