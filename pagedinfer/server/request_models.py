"""The bodies of requests. Their descriptions are the server's documentation.

Types are checked here, and strictly: nothing is turned from text into a number. Ranges are SamplingParams'
business. What OpenAI has and we do not is refused where it would change the answer (`suffix`, `best_of`),
and accepted without effect where it would not (`user`, `metadata`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

MAX_STOPS = 128
MAX_WORDS = 1024
MAX_TOKEN_IDS = 16_384
MAX_MESSAGES = 4096
MAX_TOOLS = 512

TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS)]
Words = Annotated[list[str], Field(max_length=MAX_WORDS)]
NoEffect = Annotated[Any, Field(description="accepted, without effect")]

Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                        },
                        {"type": "null"},
                    ]
                },
            },
        }
    ),
]
Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
                        "description": {"type": "string"},
                        "parameters": {"type": "object"},
                    },
                },
            },
        }
    ),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class Body(BaseModel):
    """Of any request: strict types, and no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    """What a stream brings besides."""

    include_usage: bool | None = Field(None, description="one more chunk with the usage, before the end")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far on every chunk")
    include_obfuscation: NoEffect = None


class SamplingBody(Body):
    """What both kinds of completion take: OpenAI's parameters, and SamplingParams' under their own names."""

    model: str | None = Field(None, description="one of /v1/models; the served model if left out")
    n: int | None = Field(None, description="choices for each prompt")
    temperature: float | None = Field(None, description="0 to 2; 0 takes the most likely token")
    top_p: float | None = Field(None, description="above 0, at most 1")
    top_k: int | None = Field(None, description="0 and -1: off")
    min_p: float | None = Field(None, description="0 to 1")
    presence_penalty: float | None = Field(None, description="-2 to 2")
    frequency_penalty: float | None = Field(None, description="-2 to 2")
    repetition_penalty: float | None = Field(None, description="above 0; 1: off")
    seed: int | None = Field(None, description="makes the answer reproducible")
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="texts that end the answer"
    )
    stop_token_ids: TokenIds | None = Field(None, description="tokens that end the answer")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-sequence token")
    max_tokens: int | None = Field(None, description="the most tokens to generate; fewer if the context ends")
    min_tokens: int | None = Field(None, description="nothing ends the answer before so many tokens")
    prompt_logprobs: int | None = Field(None, description="log-probabilities of the prompt's tokens")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool | None = Field(None, description="as in SamplingParams")
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string in the text")
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_TOKEN_IDS)] | None = Field(
        None, description="added to the logits of these token ids; -100 to 100"
    )
    allowed_token_ids: TokenIds | None = Field(None, description="only these tokens may be generated")
    bad_words: Words | None = Field(None, description="texts that are never generated")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="the form of the text: one of json, regex, choice, grammar and json_object"
    )
    response_format: dict[str, Any] | None = Field(None, description="what form the answer must have")
    truncate_prompt_tokens: int | None = Field(
        None, description="keep only so many last tokens of the prompt"
    )

    stream: bool | None = Field(None, description="send the answer as it is generated")
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, description="lower is more urgent, under --scheduling-policy priority")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="share cached prompts with this salt only"
    )
    return_token_ids: bool | None = Field(None, description="add token ids to the answer")
    request_id: str | None = Field(None, max_length=128, description="a name for this request")

    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None


class CompletionBody(SamplingBody):
    """Of /v1/completions."""

    prompt: Prompts = Field(description="a text, token ids, or a list of either")
    echo: bool | None = Field(None, description="begin the answer with the prompt")
    logprobs: int | None = Field(None, description="log-probabilities of so many tokens at each position")
    add_special_tokens: bool | None = Field(None, description="let the tokenizer add its BOS, as by default")
    suffix: str | None = Field(None, description="not supported")
    best_of: int | None = Field(None, description="not supported, unless it is n")


class ChatBody(SamplingBody):
    """Of /v1/chat/completions."""

    messages: Messages = Field(description="the conversation so far: objects with a role and a content")
    max_completion_tokens: int | None = Field(None, description="OpenAI's new name of max_tokens")
    logprobs: bool | None = Field(None, description="give the log-probabilities of the answer's tokens")
    top_logprobs: int | None = Field(None, description="with logprobs: so many best tokens at each position")
    tools: Tools | None = Field(None, description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(
        None, description="whether it may, or must, or which one it must"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at the most")
    add_generation_prompt: bool | None = Field(None, description="end the prompt with what begins an answer")
    continue_final_message: bool | None = Field(None, description="go on with the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="more variables for the template")
    chat_template: NoEffect = Field(None, description="not supported: templates are the server's")
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out of the answer")
    reasoning_effort: str | None = Field(
        None, max_length=32, description="handed to the template under this name"
    )
    modalities: Annotated[list[str], Field(max_length=8)] | None = Field(None, description='["text"]')
    verbosity: NoEffect = None
    prediction: NoEffect = None


class TokenizeBody(Body):
    """Of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="by default for a prompt, but not for messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=2**20)]
