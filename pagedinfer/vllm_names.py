"""What to say about a name that is none here: vLLM's that pagedinfer has not, older ones, typing errors.

Torch-free.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

_LORA = "merge the adapter into the checkpoint first, as peft's merge_and_unload does"
_DRAFTS = "tokens are drawn one at a time; leave it out"
_MEDIA = "models take text alone; leave it out"

_ABSENT = {
    # LLM, serve
    "compilation_config": "nothing is compiled at the start; leave it out",
    "cpu_offload_gb": "take more GPUs (tensor_parallel_size) or a smaller dtype",
    "data_parallel_size": "start a server for each, behind a load balancer",
    "distributed_executor_backend": "each rank is a process; leave it out, or see distributed_backend",
    "enable_expert_parallel": "tensor_parallel_size divides the experts too",
    "enable_lora": _LORA,
    "guided_decoding_backend": "there is one; leave it out",
    "kv_cache_dtype": "the KV cache has the dtype of the model; leave it out",
    "limit_mm_per_prompt": _MEDIA,
    "lora_modules": _LORA,
    "max_lora_rank": _LORA,
    "max_loras": _LORA,
    "mm_processor_kwargs": _MEDIA,
    "num_speculative_tokens": _DRAFTS,
    "pipeline_parallel_size": "use tensor_parallel_size",
    "quantization": "take a checkpoint in a half type, or a GGUF file, which is converted when it is loaded",
    "speculative_config": _DRAFTS,
    "speculative_model": _DRAFTS,
    "tokenizer_mode": "tokenizers are transformers' fast ones where there are; leave it out",
    "trust_remote_code": "code in a checkpoint is never run; docs/models.md lists what is supported without",
    # requests
    "best_of": "ask for n choices, with logprobs, and keep the best",
    "extra_args": "leave it out",
    "flat_logprobs": "leave it out",
    "logprob_token_ids": "logprobs=-1 gives those of all tokens",
    "lora_request": _LORA,
    "skip_reading_prefix_cache": "a cache_salt of its own keeps a prompt from what others have cached",
    "use_beam_search": "LLM.beam_search searches",
}
"""vLLM's, and what to do without."""

_INSTEAD = {
    "guided_decoding": "structured_outputs=StructuredOutputsParams(...)",
    "guided_json": 'structured_outputs={"json": ...}',
    "guided_regex": 'structured_outputs={"regex": ...}',
    "guided_choice": 'structured_outputs={"choice": [...]}',
    "guided_grammar": 'structured_outputs={"grammar": ...}',
    "functions": "tools",
    "function_call": "tool_choice",
    "enable_thinking": 'chat_template_kwargs={"enable_thinking": ...}',
    "max_length": "max_tokens",
    "num_return_sequences": "n",
}
"""What has another name here."""


def hint(name: str, known: Collection[str]) -> str:
    """How a message about an unknown name goes on: "; ...", or nothing if there is nothing to say.

    Args:
        name: as in Python, with `_`.
        known: the names that there are.
    """
    instead = _INSTEAD.get(name)
    if instead is not None and instead.partition("=")[0] in known:
        return f"; use {instead}"
    if name in _ABSENT:
        return f"; vLLM has it, pagedinfer does not (yet): {_ABSENT[name]}"
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
