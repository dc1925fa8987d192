"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from pagedinfer.server.api_errors import invalid
from pagedinfer.server.chat_tools import check_tools
from pagedinfer.server.request_models import DetokenizeBody, TokenizeBody
from pagedinfer.server.response_models import Detokenized, Tokenized
from pagedinfer.server.service import Service


async def tokenize(service: Service, body: TokenizeBody) -> Tokenized:
    """The token ids of a prompt or of messages, as a completion would have them."""
    service.check_ready()
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages must be given", param="prompt")
    if body.messages is not None:
        prompt = await service.chat_prompt(
            body.messages,
            add_generation_prompt=_adds_generation_prompt(body),
            continue_final_message=bool(body.continue_final_message),
            tools=check_tools(body.tools),
            template_kwargs=body.chat_template_kwargs,
        )
        token_ids = prompt.token_ids
        if body.add_special_tokens:
            token_ids = service.encode(prompt.text or "", add_special_tokens=True)
    else:
        assert body.prompt is not None
        adds = body.add_special_tokens is not False
        token_ids = await asyncio.to_thread(service.encode, body.prompt, add_special_tokens=adds)
    strings = None
    if body.return_token_strs:
        strings = [str(token) for token in service.tokenizer.convert_ids_to_tokens(token_ids)]
    return Tokenized(len(token_ids), service.engine.limits.max_model_len, token_ids, strings)


def detokenize(service: Service, body: DetokenizeBody) -> Detokenized:
    """The text of token ids, special tokens included."""
    service.check_ready()
    service.check_model(body.model)
    vocab_size = service.engine.limits.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"tokens must be in [0, {vocab_size}), the vocabulary, got {str(token_id)[:40]}",
                param="tokens",
            )
    return Detokenized(str(service.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)))


def _adds_generation_prompt(body: TokenizeBody) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt
