"""What the scheduler tells of a step, request by request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagedinfer.engine.batch import BestTokens
from pagedinfer.engine.request import Request


@dataclass(slots=True)
class TopTokens:
    """What is to be reported of a position beside the token drawn there."""

    rank: int  # of the drawn token, from 1
    token_ids: list[int]  # the best ones, falling: at most as many as the request asks for
    logprobs: list[float]

    @classmethod
    def of_row(cls, best: BestTokens, row: int, count: int) -> Self:
        """Of one position, `count` tokens or as many as there are."""
        token_ids = [token for token in best.top_ids[row, :count].tolist() if token >= 0]
        logprobs: list[float] = best.top_logprobs[row, : len(token_ids)].tolist()
        return cls(int(best.ranks[row]), token_ids, logprobs)


@dataclass(slots=True)
class RequestUpdate:
    """What a step meant for one request: a token, its end, or both.

    Of a request that `reports_at_end` the steps between its first token and its end are not told one by one.
    """

    request: Request
    row: int  # its row in the StepOutput
    new_token_ids: list[int]  # since the last update; empty if no token could be sampled
    logprobs: list[float]  # of these tokens
    finish_reason: str | None = None  # "stop", "length" or "error"; None: goes on
    stop_reason: int | str | None = None  # the stop token's id; None for EOS
    top: TopTokens | None = None  # if the request has `num_logprobs`, and a token was drawn

    @property
    def request_id(self) -> str:
        return self.request.request_id
