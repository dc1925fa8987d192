"""An engine until it has nothing more to do."""

from __future__ import annotations

from pagedinfer import RequestOutput
from pagedinfer.engine.engine import LLMEngine


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """The last output of each request; all blocks of the KV cache are free then."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.scheduler.kv.num_free == engine.scheduler.config.num_blocks
    return outputs
