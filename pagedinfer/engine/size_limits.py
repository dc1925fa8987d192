"""Whether a request can ever run, and how long it may get."""

from __future__ import annotations

from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.errors import RequestTooLargeError


def max_total_tokens(request: Request, config: SchedulerConfig) -> int:
    """The most tokens, prompt and output, that `request` may reach.

    Raises:
        RequestTooLargeError: it can never run; the message has both sizes and what to change.
        ValueError: there is nothing left to generate.
    """
    name = f"request {request.request_id!r}"
    num_tokens = request.num_tokens
    if num_tokens >= config.max_model_len:
        raise RequestTooLargeError(
            f"{name}: its prompt has {num_tokens} tokens, and with at least one token to generate that is "
            f"more than max_model_len={config.max_model_len}; shorten the prompt or raise max_model_len"
        )
    max_tokens = request.sampling_params.max_tokens
    longest = config.max_model_len
    if max_tokens is not None:
        longest = min(longest, request.num_prompt_tokens + max_tokens)
    if longest <= num_tokens:
        raise ValueError(
            f"{name}: max_tokens={max_tokens} leaves nothing to generate after "
            f"{request.num_output_tokens} tokens"
        )
    if longest - 1 > config.num_kv_tokens:  # the last token's KV is never needed
        raise RequestTooLargeError(
            f"{name}: its prompt of {request.num_prompt_tokens} tokens and up to "
            f"{longest - request.num_prompt_tokens} generated ones need KV memory for {longest - 1} tokens, "
            f"but there is room for {config.num_kv_tokens}; lower max_tokens, shorten the prompt or raise "
            f"gpu_memory_utilization (kv_cache_memory_bytes on a CPU)"
        )
    return longest
