"""The best tokens of rows of logits, and of the prompts of requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import AdmittedRequest, Batch, BestTokens
from pagedinfer.runner.upload import upload

_ROWS = 256  # of logits at a time: a prompt's all at once would take more memory than the largest step


def best_tokens(logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> ops.TopLogprobs:
    """`ops.top_logprobs` for any number of tokens; -1: the whole vocabulary."""
    num_top = vocab_size if num_top == -1 else min(num_top, vocab_size)
    if num_top <= ops.MAX_TOP_LOGPROBS:
        return ops.top_logprobs(logits, token_ids, num_top, vocab_size=vocab_size)
    best = ops.top_logprobs(logits, token_ids, 0, vocab_size=vocab_size)
    logprobs = torch.log_softmax(logits[:, :vocab_size].float(), dim=-1)
    top_logprobs, top_ids = logprobs.sort(dim=-1, descending=True, stable=True)
    top_logprobs, top_ids = top_logprobs[:, :num_top], top_ids[:, :num_top]
    # A row with NaN, and a token without a chance, have no place in the order.
    top_ids = torch.where(top_logprobs > -torch.inf, top_ids, -1)
    return ops.TopLogprobs(best.logprobs, best.ranks, top_ids, top_logprobs)


class BestTokensOnTheWay:
    """The best tokens of some rows of a step, going to the host; look at them once the step has ended.

    Args:
        best: of the rows, on the device; may be overwritten by the next step.
        rows: which of the step's rows they are, in rising order; None: the first ones.
        num_rows: how many the step has; None: as many as `best`.
    """

    def __init__(
        self, best: ops.TopLogprobs, rows: list[int] | None = None, num_rows: int | None = None
    ) -> None:
        self._rows = rows
        self._num_rows = best.ranks.shape[0] if num_rows is None else num_rows
        count = None if rows is not None else self._num_rows
        tensors = (best.logprobs, best.ranks, best.top_ids, best.top_logprobs)
        self._tensors = [_to_host(tensor[:count]) for tensor in tensors]

    def result(self) -> BestTokens:
        """Of all rows of the step; rank 0 and ids of -1 in those that nothing is known of."""
        found = BestTokens(*(tensor.numpy() for tensor in self._tensors))
        if self._rows is None:
            return found
        shape = (self._num_rows, found.top_ids.shape[1])
        best = BestTokens(
            np.zeros(self._num_rows, np.float32),
            np.zeros(self._num_rows, np.int64),
            np.full(shape, -1, np.int64),
            np.full(shape, -np.inf, np.float32),
        )
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            getattr(best, name)[self._rows] = getattr(found, name)
        return best


def _to_host(tensor: Tensor) -> Tensor:
    """A copy, on its way without anybody waiting for it."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]
    num_top: int


class PromptRater:
    """Finds the log-probabilities of the prompts' tokens, chunk by chunk, for requests that want them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._prompts: dict[int, _Prompt] = {}  # by slot

    def set(self, request: AdmittedRequest) -> None:
        """A request takes a slot. One that has generated something has had its prompt rated."""
        self._prompts.pop(request.slot, None)
        num_top = request.sampling_params.prompt_logprobs
        if num_top is not None and len(request.token_ids) == request.num_prompt_tokens:
            self._prompts[request.slot] = _Prompt(request.token_ids, num_top)

    def rate(
        self, batch: Batch, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> dict[str, tuple[int, list[BestTokensOnTheWay]]]:
        """The parts of prompts that a step computes.

        Args:
            batch: the step.
            hidden: [number of tokens, hidden size], what the model gave for it.
            compute_logits: from hidden states [n, hidden size] to logits [n, padded vocabulary].

        Returns:
            By request: the position of the first token that is rated, and the tokens from it, in pieces.
        """
        rated: dict[str, tuple[int, list[BestTokensOnTheWay]]] = {}
        if not self._prompts:
            return rated
        first_row = 0
        for request in batch.requests:
            prompt = self._prompts.get(request.slot)
            if prompt is not None:
                # The logits at a position rate the token at the next one.
                end = min(request.start + request.num_tokens, len(prompt.token_ids) - 1)
                pieces = [
                    self._rate(prompt, hidden[row : row + count], position + 1, compute_logits)
                    for position in range(request.start, end, _ROWS)
                    for row, count in [(first_row + position - request.start, min(_ROWS, end - position))]
                ]
                if pieces:
                    rated[request.request_id] = (request.start + 1, pieces)
            first_row += request.num_tokens
        return rated

    def _rate(
        self, prompt: _Prompt, hidden: Tensor, first: int, compute_logits: Callable[[Tensor], Tensor]
    ) -> BestTokensOnTheWay:
        tokens = np.array(prompt.token_ids[first : first + hidden.shape[0]], np.int64)
        (token_ids,) = upload([tokens], self._device)
        best = best_tokens(compute_logits(hidden), token_ids, prompt.num_top, self._vocab_size)
        return BestTokensOnTheWay(best)


def join(pieces: list[BestTokensOnTheWay]) -> BestTokens:
    """The tokens of consecutive positions, in one; their step has ended."""
    results = [piece.result() for piece in pieces]
    if len(results) == 1:
        return results[0]
    return BestTokens(
        *(
            np.concatenate([getattr(result, name) for result in results])
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
        )
    )
