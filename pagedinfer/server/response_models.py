"""The bodies of answers, OpenAI's with what we add to them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Of a usage."""

    cached_tokens: int


class Usage(Struct):
    """How many tokens a request took, of all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    """One token at one position of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]

# ---- /v1/completions -------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    """Of the tokens of a choice; the tokens join to its text, and the offsets point into it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """A choice, or what is new of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """An answer, or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


# ---- /v1/chat/completions --------------------------------------------------------------------------


class TopLogprob(Struct):
    """One of the best tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The token at a position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Of the tokens of a choice."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call that the model wants made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """The model's message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """A choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """The answer to a chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionCallDelta(Struct):
    """What is new of a call."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """What is new of a call; the id and the name come first, and once."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What is new of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


# ---- the others ------------------------------------------------------------------------------------


class Model(Struct):
    """A name under which the model is served."""

    id: str
    created: int
    max_model_len: int
    vocab_size: int
    root: str
    owned_by: str = "pagedinfer"
    object: Literal["model"] = "model"


class ModelList(Struct):
    """Of /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(Struct):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """Of /detokenize."""

    prompt: str


class Version(Struct):
    """Of /version."""

    version: str


class ErrorDetail(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """Of every answer that is not 200."""

    error: ErrorDetail


def schema_of(*types: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """JSON schemas of these, and the components that they refer to, for OpenAPI."""
    import msgspec

    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return list(schemas), components
