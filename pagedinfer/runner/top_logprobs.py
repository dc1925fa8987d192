"""The best tokens at each position, for the requests that ask for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.runner.best_tokens import best_tokens
from pagedinfer.runner.upload import upload


class TopLogprobs:
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

    def wanted_by(self, batch: Batch) -> bool:
        """Whether a request that draws in this step asks for any."""
        wanted = self._wanted
        return self._num_wanting > 0 and any(
            request.sample and wanted[request.slot] is not None for request in batch.requests
        )

    def compute(self, batch: Batch, logits: Tensor, token_ids: Tensor) -> TopLogprobsResult:
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
        top = best_tokens(logits, token_ids, most, self._vocab_size)
        return TopLogprobsResult(rows, len(wanted), top)


class TopLogprobsResult:
    """Ranks and best tokens of some rows of a step. Read it when the step's event has passed."""

    def __init__(self, rows: list[int], num_rows: int, top: ops.TopLogprobs) -> None:
        self._rows = rows
        self._num_rows = num_rows
        self._ranks = top.ranks.to("cpu", non_blocking=True)
        self._top_ids = top.top_ids.to("cpu", non_blocking=True)
        self._top_logprobs = top.top_logprobs.to("cpu", non_blocking=True)

    def add_to(self, output: StepOutput) -> None:
        """Gives a step's output its `ranks`, `top_ids` and `top_logprobs`."""
        num_top = self._top_ids.shape[1]
        output.ranks = np.zeros(self._num_rows, np.int64)
        output.top_ids = np.full((self._num_rows, num_top), -1, np.int64)
        output.top_logprobs = np.full((self._num_rows, num_top), -np.inf, np.float32)
        output.ranks[self._rows] = self._ranks.numpy()
        output.top_ids[self._rows] = self._top_ids.numpy()
        output.top_logprobs[self._rows] = self._top_logprobs.numpy()
