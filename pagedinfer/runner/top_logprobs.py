"""The best tokens at each position, for the requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import Batch
from pagedinfer.runner.best_tokens import BestTokensOnTheWay, best_tokens
from pagedinfer.runner.upload import upload

_CAPTURED_COUNTS = (5, 20)
"""Numbers of best tokens that there are CUDA graphs for: what the usual servers show at most, and allow."""


class SlotTopLogprobs:
    """How many of the best tokens each slot's request wants to see; a step computes only their rows."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._wanted: list[int | None] = [None] * max_num_seqs
        self._num_wanting = 0  # slots, those that nobody holds any more included

    def set(self, slot: int, num_logprobs: int | None) -> None:
        """For the request that takes `slot`; None: nothing."""
        self._num_wanting += (num_logprobs is not None) - (self._wanted[slot] is not None)
        self._wanted[slot] = num_logprobs

    def most_wanted(self, batch: Batch) -> int | None:
        """The most tokens that a request asks for which draws in this step; None: nobody asks."""
        if self._num_wanting == 0:
            return None
        wanted = [self._wanted[request.slot] for request in batch.requests if request.sample]
        return max((count for count in wanted if count is not None), default=None)

    def captured_count(self, most_wanted: int) -> int | None:
        """For how many tokens a CUDA graph should be made that serves `most_wanted`; None: for none."""
        counts = [min(count, self._vocab_size) for count in _CAPTURED_COUNTS]
        return next((count for count in counts if count >= most_wanted), None)

    def of_all_rows(self, logits: Tensor, token_ids: Tensor, count: int) -> ops.TopLogprobs:
        """The same for every row, asked for or not; waits for nothing.

        Args:
            logits: [rows, padded vocabulary].
            token_ids: int64 [rows], what was drawn.
        """
        return ops.top_logprobs(logits, token_ids, count, vocab_size=self._vocab_size)

    def compute(self, batch: Batch, logits: Tensor, token_ids: Tensor) -> BestTokensOnTheWay:
        """What a step reports, on its way to the host.

        Args:
            logits: [rows, padded vocabulary] of the requests that draw, before anything changed them.
            token_ids: int64 [rows], what was drawn.
        """
        wanted = [self._wanted[request.slot] for request in batch.requests if request.sample]
        rows = [row for row, count in enumerate(wanted) if count is not None]
        # No more than there is: the op sorts what it is asked for.
        most = min(max(count for count in wanted if count is not None), self._vocab_size)
        if len(rows) < len(wanted):
            (index,) = upload([np.array(rows, np.int64)], self._device)
            logits, token_ids = logits.index_select(0, index), token_ids.index_select(0, index)
        return BestTokensOnTheWay(best_tokens(logits, token_ids, most, self._vocab_size), rows, len(wanted))
