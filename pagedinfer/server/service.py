"""What the routes share: the engine, the names and limits of the server, prompts and templates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from pagedinfer.chat_template import ChatTemplate
from pagedinfer.config import EngineConfig
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.errors import EngineDeadError, EngineStartError
from pagedinfer.logging import get_logger
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.server.api_errors import ApiError, invalid, unavailable
from pagedinfer.server.async_engine import AsyncEngine
from pagedinfer.server.metrics import Metrics, ThroughputLog
from pagedinfer.server.parsing.choose import ParserChoice
from pagedinfer.server.request_models import SamplingBody
from pagedinfer.server.sampling import sampling_params
from pagedinfer.server.settings import ServerSettings
from pagedinfer.server.token_bytes import TokenBytes
from pagedinfer.unicode_text import check_unicode

logger = get_logger(__name__)

_LONG_TEXT = 20_000  # characters; tokenizing more than this is done beside the event loop


class Service:
    """A server's engine and what is said about it.

    Args:
        engine: not started yet.
        settings: of the server.
        metrics: which the engine tells what happens.
    """

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.created = int(time.time())
        self.model_names = settings.served_model_names or (engine.config.model,)
        self.failure: Exception | None = None
        """Why the engine could not start, or is dead."""
        self._watcher: asyncio.Task[None] | None = None
        self._logger: asyncio.Task[None] | None = None

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    # ---- life ----

    def start(self, on_failure: Callable[[], None]) -> None:
        """Starts the engine beside what else there is to do; `on_failure` is called if it fails or dies."""
        self._watcher = asyncio.create_task(self._watch(on_failure))
        self._logger = asyncio.create_task(self._log_throughput())

    async def _watch(self, on_failure: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            await self.engine.start()
            logger.info("ready after %.1f s", time.monotonic() - started)
            await self.engine.wait_dead()
            self.failure = EngineDeadError("the engine's process has ended")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, EngineStartError | ValueError):
                logger.exception("the engine cannot start")
            self.failure = error
        on_failure()

    async def _log_throughput(self) -> None:
        log = ThroughputLog(self.metrics)
        while True:
            await asyncio.sleep(log.SECONDS)
            line = log.line(time.monotonic())
            if line is not None:
                logger.info(line)

    async def close(self) -> None:
        """Ends the engine."""
        for task in (self._watcher, self._logger):
            if task is not None:
                task.cancel()
        await self.engine.close()

    def check_ready(self) -> None:
        """Raises ApiError with 503 unless requests can be served."""
        if self.failure is not None or self.engine.is_dead:
            raise ApiError(503, "the engine is dead", code="engine_dead")
        if not self.engine.is_ready:
            raise unavailable("the model is being loaded")

    # ---- requests ----

    def check_model(self, name: str | None) -> str:
        """The name that an answer carries.

        Raises:
            ApiError: 404; it is none of ours.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r}; there is {', '.join(map(repr, self.model_names))}",
                param="model",
                code="model_not_found",
            )
        return name

    def sampling_params(self, body: SamplingBody, **more: Any) -> SamplingParams:
        """See `pagedinfer.server.sampling`; checked against the model too."""
        params = sampling_params(
            body,
            self.engine.limits.default_sampling_params,
            max_choices=self.settings.max_choices,
            **more,
        )
        self.engine.check_params(params)
        return params

    def priority(self, body: SamplingBody) -> int:
        """Of a request.

        Raises:
            ApiError: it has one, and the scheduler looks at none; or one that is no 32-bit integer.
        """
        if body.priority is None or body.priority == 0:
            return 0
        if self.config.scheduling_policy != "priority":
            raise invalid("priority needs a server with --scheduling-policy priority", param="priority")
        if abs(body.priority) >= 2**31:
            raise invalid(f"priority must fit 32 bits, got {str(body.priority)[:40]}", param="priority")
        return body.priority

    async def prompts(
        self, prompt: Any, *, add_special_tokens: bool = True, cache_salt: str | None = None
    ) -> list[ProcessedPrompt]:
        """The prompts of a body: a text, a list of token ids, or a list of either.

        Raises:
            ApiError: too many, or nothing of the kind.
            ValueError: a malformed one.
        """
        is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        given = prompt if is_list else [prompt]
        for each in given:
            if not isinstance(each, str | list):
                raise invalid(
                    f"prompt must be a text, a list of token ids, or a list of either, got {each!r:.40}",
                    param="prompt",
                )
        if not prompt:
            raise invalid("prompt is empty: it must have at least one token", param="prompt")
        if len(given) > self.settings.max_prompts:
            raise invalid(
                f"prompt must hold at most {self.settings.max_prompts} prompts, got {len(given)}",
                param="prompt",
            )
        length = sum(len(each) for each in given)

        def process() -> list[ProcessedPrompt]:
            return [self._prompt(each, add_special_tokens, cache_salt or "") for each in given]

        return await asyncio.to_thread(process) if length > _LONG_TEXT else process()

    def _prompt(self, prompt: str | list[int], add_special_tokens: bool, salt: str) -> ProcessedPrompt:
        if isinstance(prompt, list):
            return self.engine.input_processor.process({"prompt_token_ids": prompt, "cache_salt": salt})
        if add_special_tokens or self.engine.tokenizer is None:
            return self.engine.input_processor.process({"prompt": prompt, "cache_salt": salt})
        return ProcessedPrompt(prompt, self.encode(prompt, add_special_tokens=False), salt)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A text's token ids, at least one."""
        check_unicode("prompt", text)
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise invalid("prompt is empty: it must have at least one token", param="prompt")
        return token_ids

    @property
    def tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            ApiError: there is none.
        """
        if self.engine.tokenizer is None:
            raise invalid("this server has no tokenizer (--skip-tokenizer-init): give token ids")
        return self.engine.tokenizer

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Of the tokenizer."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def _template(self) -> ChatTemplate | ValueError:
        try:
            return ChatTemplate(self.tokenizer, self.config.chat_template)
        except ValueError as error:
            return error

    @cached_property
    def parsers(self) -> ParserChoice:
        """Of what the model writes."""
        template = self.chat_template.source
        return ParserChoice(
            template, tool_calls=self.settings.tool_call_parser, reasoning=self.settings.reasoning_parser
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """How chats become prompts.

        Raises:
            ApiError: there is no template.
        """
        if isinstance(self._template, ValueError):
            raise invalid(
                "this model has no chat template: start the server with --chat-template FILE, or use "
                "/v1/completions",
                param="messages",
            )
        return self._template

    async def chat_prompt(
        self, messages: Sequence[dict[str, Any]], *, cache_salt: str | None = None, **options: Any
    ) -> ProcessedPrompt:
        """A chat as a prompt; see `ChatTemplate.encode` for the options."""
        template = self.chat_template
        text, token_ids = await asyncio.to_thread(template.encode, messages, **options)
        if not token_ids:
            raise invalid("messages give an empty prompt", param="messages")
        return ProcessedPrompt(text, token_ids, cache_salt or "")
