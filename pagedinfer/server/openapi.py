"""/openapi.json: what FastAPI knows of the requests, with what we know of the answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from pagedinfer.server import response_models as answers

_ANSWERS: dict[tuple[str, str], Any] = {
    ("post", "/v1/completions"): answers.Completion,
    ("post", "/v1/chat/completions"): answers.ChatCompletion,
    ("get", "/v1/models"): answers.ModelList,
    ("get", "/v1/models/{model}"): answers.Model,
    ("post", "/tokenize"): answers.Tokenized,
    ("post", "/detokenize"): answers.Detokenized,
    ("get", "/version"): answers.Version,
}
_STREAMS = {"/v1/completions": answers.Completion, "/v1/chat/completions": answers.ChatChunk}
_ERRORS = {
    "400": "the request is wrong; the message says in what",
    "404": "there is no such model or route",
    "413": "the body is too large",
    "500": "the engine failed",
    "503": "the model is being loaded, the queue is full, or the engine is dead",
}


def openapi_schema(app: FastAPI, *, guarded: bool) -> dict[str, Any]:
    """The schema of all routes; made once.

    Args:
        guarded: whether an API key is needed.
    """
    if app.openapi_schema:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    types = [*dict.fromkeys([*_ANSWERS.values(), *_STREAMS.values(), answers.ErrorBody])]
    refs, components = answers.schema_of(*types)
    ref_of = dict(zip(types, refs, strict=True))
    all_components = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        all_components.pop(unused, None)
    all_components.update(components)
    error = {"application/json": {"schema": ref_of[answers.ErrorBody]}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            ok: dict[str, Any] = {"description": "OK"}
            if (method, path) in _ANSWERS:
                ok["content"] = {"application/json": {"schema": ref_of[_ANSWERS[method, path]]}}
            if path in _STREAMS:
                ok["content"]["text/event-stream"] = {"schema": ref_of[_STREAMS[path]]}
            operation["responses"] = {"200": ok} | {
                status: {"description": text, "content": error} for status, text in _ERRORS.items()
            }
            if guarded and path != "/health":
                operation["responses"]["401"] = {"description": "no valid API key", "content": error}
                operation["security"] = [{"key": []}]
    if guarded:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    app.openapi_schema = schema
    return schema
