"""What form a request wants its answer to have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagedinfer.server.api_errors import invalid
from pagedinfer.server.chat_tools import ToolUse
from pagedinfer.server.request_models import SamplingBody


def response_constraint(body: SamplingBody, tools: ToolUse | None = None) -> dict[str, Any] | None:
    """`structured_outputs` of the sampling parameters; None: any text will do.

    Raises:
        ApiError: a malformed response_format, or more than one form at once.
    """
    schema = None if tools is None else tools.schema()
    forms = {
        "structured_outputs": body.structured_outputs,
        "response_format": None if body.response_format is None else _of_format(body.response_format),
        "tool_choice": None if schema is None else {"json": json.dumps(schema)},
    }
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise invalid(f"{names} cannot be given together", param=next(iter(given)))
    return next(iter(given.values()), None)


def _of_format(response_format: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        description = response_format.get("json_schema")
        schema = description.get("schema") if isinstance(description, Mapping) else None
        if not isinstance(schema, Mapping):
            raise invalid(
                'response_format must hold a schema, as {"type": "json_schema", "json_schema": '
                '{"name": "...", "schema": {...}}}',
                param="response_format",
            )
        return {"json": schema}
    raise invalid(
        f"response_format must be of type text, json_object or json_schema, got {kind!r:.40}",
        param="response_format",
    )
