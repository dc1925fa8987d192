"""A number that tells two schedules apart."""

from __future__ import annotations

import zlib
from array import array

from pagedinfer.engine.batch import Batch


def checksum(batch: Batch, num_tokens: int) -> int:
    """Of where each request of a batch of `num_tokens` tokens goes on, and how far, in their order."""
    requests = batch.requests
    starts = zlib.crc32(array("q", [work.start for work in requests]))
    if num_tokens == len(requests):
        return starts
    return zlib.crc32(array("q", [work.num_tokens for work in requests]), starts)
