"""From a request's body to SamplingParams."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pagedinfer.sampling_params import SamplingParams
from pagedinfer.server.api_errors import invalid
from pagedinfer.server.request_models import ChatBody, SamplingBody

_NAMES = [
    field.name
    for field in fields(SamplingParams)
    if field.name in SamplingBody.model_fields and field.name != "logprobs"
]
_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")


def sampling_params(
    body: SamplingBody, defaults: dict[str, Any], *, max_choices: int, **more: Any
) -> SamplingParams:
    """The parameters that a body asks for.

    Args:
        body: of either kind of completion.
        defaults: what the model's generation_config.json has; what the body has wins, zeros included.
        max_choices: the largest n.
        more: parameters that do not come from a field of the same name; None: not given.

    Raises:
        ApiError: more choices than may be.
        ValueError: as SamplingParams.
    """
    if body.n is not None and body.n > max_choices:
        raise invalid(f"n must be at most {max_choices}, got {body.n}", param="n")
    values: dict[str, Any] = {name: defaults[name] for name in _MODEL_DEFAULTS if name in defaults}
    if isinstance(body, ChatBody):
        values.setdefault("max_tokens", None)  # to the end of the context
    given = {name: getattr(body, name) for name in _NAMES} | more
    values |= {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**values)
