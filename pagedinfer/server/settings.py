"""What a server is told besides the engine's parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Names, keys and limits of a server."""

    served_model_names: tuple[str, ...] = ()
    """Names that clients may use, the first of which answers carry; the model's path by default."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens every route; none: everything is open."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: "hermes", "llama3", "qwen", "none"; "auto": by the chat template."""
    reasoning_parser: str = "auto"
    """How it writes its reasoning: "think", "none"; "auto": by the chat template."""
    max_num_queued_requests: int | None = None
    """The most requests that wait for a place to run; beyond, 503. None: no limit."""
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_prompts: int = 2048
    """In one request; each counts as often as it has choices."""
    max_choices: int = 128
    """The largest n."""
    allowed_origins: tuple[str, ...] = ()
    """Of CORS; none: it is off."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    """The prefix under which a proxy serves us."""
    vllm_metrics: bool = True
    """Export the metrics under vLLM's names as well."""
