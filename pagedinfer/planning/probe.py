"""A short load on an engine of its own, to see what limits it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedinfer.engine.advice import Facts
from pagedinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedinfer.engine.engine import LLMEngine


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at once, of random tokens."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float  # after which it is cut off


def probe(engine: LLMEngine, load: Load) -> Facts:
    """Runs a load on an idle engine; what it measured meanwhile, beside its parameters.

    Raises:
        RequestTooLargeError: a request of such lengths can never run.
    """
    draw = random.Random(0)
    vocab_size = engine.model_config.vocab_size
    params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=True, detokenize=False)
    engine.advisor.restart()
    names = [f"probe-{i}" for i in range(load.num_requests)]
    for name in names:
        tokens = [draw.randrange(vocab_size) for _ in range(load.prompt_tokens)]
        engine.add_request(name, {"prompt_token_ids": tokens}, params)
    deadline = time.monotonic() + load.seconds
    while engine.has_unfinished_requests() and time.monotonic() < deadline:
        engine.step()
    facts = engine.advisor.facts()
    for name in names:
        engine.abort_request(name)
    return facts
