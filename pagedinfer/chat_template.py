"""From the messages of a chat to a prompt, by the model's Jinja template. Torch-free.

transformers renders the template in Jinja's sandbox: it can build text from what it is given, and reach
nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.unicode_text import check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}, and what else the template knows (tool calls, names)."""


class ChatTemplate:
    """Renders chats for one model.

    Args:
        tokenizer: of the model.
        template: a Jinja template, or the path of a file with one; by default the tokenizer's own.

    Raises:
        ValueError: there is no template, or `template` is neither one nor a file.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        if template is None and not tokenizer.chat_template:
            raise ValueError(
                "this model's tokenizer has no chat template: give one as chat_template (a Jinja template or "
                "the path of a file with one), or give the whole prompt as text to generate"
            )
        self._tokenizer = tokenizer
        self._template = None if template is None else read_template(template)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        self._reserved = {"messages", *(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)}

    @property
    def source(self) -> str:
        """The Jinja template; where a tokenizer has several by name, the default one."""
        template: Any = self._template or self._tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("default") or next(iter(template.values()))
        return str(template)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.

        Args:
            messages: at least one. A content may be a string or a list of {"type": "text", "text": "..."},
                which are joined by newlines. It may be missing or None, as beside calls of tools.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: leave the last message open, to be gone on with.
            tools: JSON schemas of functions that the model may call.
            template_kwargs: more variables for the template.

        Raises:
            ValueError: a malformed message, a variable whose name is taken, or whatever the template has
                against these messages.
        """
        taken = sorted(self._reserved & set(template_kwargs or {}))
        if taken:
            raise ValueError(f"template_kwargs cannot set {', '.join(taken)}")
        chat = [_check(i, message) for i, message in enumerate(_check_list(messages))]
        options = {
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(template_kwargs or {}),
        }
        try:
            return self._apply(chat, options)
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            raise ValueError(f"the chat template failed on these messages: {error}") from error

    def _apply(self, chat: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """What the template makes of these messages. Raises whatever it does."""

        def text(chat: list[dict[str, Any]]) -> Any:
            return self._tokenizer.apply_chat_template(
                chat, chat_template=self._template, tokenize=False, **options
            )

        try:
            return str(text(chat))
        except Exception:
            # transformers hands on no content that is None, as beside calls of tools, and templates that
            # know of no tools join it to other text.
            if all(message.get("content") is not None for message in chat):
                raise
            return str(text([message | {"content": message.get("content") or ""} for message in chat]))

    def encode(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[int]]:
        """The prompt as text and as token ids; arguments as `render`'s.

        The tokenizer adds no special tokens: a BOS is there exactly if the template puts it there.
        """
        text = self.render(messages, **options)
        check_unicode("the chat's prompt", text)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return text, token_ids


def is_conversation(messages: Any) -> bool:
    """Whether this is one chat, a list of messages, and not a list of chats."""
    return not messages or isinstance(messages[0], Mapping)


def read_template(template: str) -> str:
    """The text of a template that is given as itself or as the path of a file.

    Raises:
        ValueError: it is neither.
    """
    if "{" in template or "\n" in template:  # Jinja, or at least no sensible path
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"chat_template must be a Jinja template or the path of a file with one, got {template!r} "
            f"({error.strerror})"
        ) from None


def _check_list(messages: Sequence[Message]) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {messages!r:.80}")
    return messages


def _check(index: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} must be an object with a role, got {message!r:.80}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text(index, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"content of message {index} must be a string or a list, got {content!r:.80}")
    return {**message, "content": content} if "content" in message else dict(message)


def _text(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise ValueError(f"content of message {index} may hold parts of type 'text' only, got {kind!r:.80}")
