"""The FastAPI application: routes, errors, and what stands before them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from pagedinfer import __version__
from pagedinfer.config import EngineConfig
from pagedinfer.server.api_errors import ApiError, api_error_of, encode_json, validation_error
from pagedinfer.server.async_engine import AsyncEngine
from pagedinfer.server.chat import create_chat_completion
from pagedinfer.server.chat_page import CHAT_PAGE
from pagedinfer.server.completions import create_completion
from pagedinfer.server.docs_page import DOCS_PAGE
from pagedinfer.server.engine_handle import ENGINE_COMMAND
from pagedinfer.server.event_stream import ClientGoneError
from pagedinfer.server.metrics import Metrics
from pagedinfer.server.middleware import ApiKeys, BodyLimit, request_name
from pagedinfer.server.openapi import openapi_schema
from pagedinfer.server.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pagedinfer.server.response_models import Model, ModelList, Version
from pagedinfer.server.service import Service
from pagedinfer.server.settings import ServerSettings
from pagedinfer.server.tokenization import detokenize, tokenize

logger = logging.getLogger(__name__)

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def create_app(
    config: EngineConfig,
    settings: ServerSettings | None = None,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    on_failure: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The application. Its engine starts with its lifespan, and loads beside it: see /health.

    Args:
        config: of the engine.
        settings: of the server.
        engine_command: the command line of the engine's process.
        on_failure: called when the engine cannot start, or has died.
    """
    settings = settings or ServerSettings()
    model_name = settings.served_model_names[0] if settings.served_model_names else config.model
    metrics = Metrics(model_name, vllm_names=settings.vllm_metrics)
    engine = AsyncEngine(
        config,
        max_num_queued_requests=settings.max_num_queued_requests,
        observer=metrics,
        command=engine_command,
    )
    service = Service(engine, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start(on_failure)
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="pagedinfer",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
    )
    app.state.service = service
    _add_error_handlers(app)
    _add_routes(app, service)
    app.openapi = lambda: openapi_schema(app, guarded=bool(settings.api_keys))  # type: ignore[method-assign]
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", tags=["OpenAI"])
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continues prompts."""
        name = request_name(request.scope, body.request_id)
        return await create_completion(service, body, request.receive, name)

    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answers a conversation."""
        name = request_name(request.scope, body.request_id)
        return await create_chat_completion(service, body, request.receive, name)

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """Lists the names under which the model is served."""
        return _json(ModelList([_model(service, name) for name in service.model_names]))

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def model(model: str) -> Response:
        """Describes one of them."""
        return _json(_model(service, service.check_model(model)))

    @app.post("/tokenize", tags=["tokens"])
    async def tokenize_route(body: TokenizeBody) -> Response:
        """Turns a text or messages into token ids, as a completion would."""
        return _json(await tokenize(service, body))

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize_route(body: DetokenizeBody) -> Response:
        """Turns token ids into text."""
        return _json(detokenize(service, body))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"])
    async def health() -> Response:
        """200 if requests can be served; 503 while the model is being loaded and once the engine is dead."""
        service.check_ready()
        return Response(status_code=200)

    @app.get("/metrics", tags=["server"])
    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        text, content_type = service.metrics.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    @app.get("/version", tags=["server"])
    async def version() -> Response:
        """The version of the server."""
        return _json(Version(__version__))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(DOCS_PAGE)

    @app.get("/chat", include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(CHAT_PAGE)


def _add_error_handlers(app: FastAPI) -> None:
    def respond(request: Request, error: Exception) -> Response:
        return api_error_of(error).response()

    def invalid_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        model = _BODIES.get(request.scope["path"])
        return validation_error(error.errors(), model, request.headers.get("content-type", "")).response()

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = str(request.scope["path"])[:200]
        messages = {404: f"there is no route {path}", 405: f"{path} does not take {request.method}"}
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    for kind in (ApiError, ValueError):
        app.add_exception_handler(kind, respond)
    from pagedinfer.errors import PagedinferError

    app.add_exception_handler(PagedinferError, respond)
    app.add_exception_handler(RequestValidationError, invalid_body)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, respond)


def _model(service: Service, name: str) -> Model:
    service.check_ready()
    limits = service.engine.limits
    return Model(name, service.created, limits.max_model_len, limits.vocab_size, service.config.model)


def _json(answer: Any) -> Response:
    return Response(encode_json(answer), media_type="application/json")
