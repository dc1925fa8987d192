"""What form a request wants its answer to have."""

from __future__ import annotations

from pagedinfer.server.api_errors import invalid
from pagedinfer.server.chat_tools import ToolUse
from pagedinfer.server.request_models import ChatBody


def check_free_form(body: ChatBody, tools: ToolUse) -> None:
    """Raises ApiError if the answer must have a form: that is not supported."""
    kind = "text" if body.response_format is None else body.response_format.get("type")
    if kind != "text":
        raise invalid(f"response_format of type {kind!r:.40} is not supported", param="response_format")
    if tools.schema() is not None:
        raise invalid('tool_choice must be "none" or "auto"', param="tool_choice")
