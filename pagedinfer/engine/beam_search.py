"""Beam search on the scheduler's forks.

A beam is a request that reports the best tokens at each position and goes on with the very best by itself.
When all beams of a prompt have reported a position, the search decides which continuations live on. One that
is a beam's own token needs nothing; any other is a fork of its beam with another last token, which shares
all KV. Beams without a continuation are aborted.

Beams of a prompt need not run in step: one that is ahead of the others (which wait for memory, or have been
preempted) has computed tokens that may turn out to be of no use, but it never waits, so nothing can stall:
a beam's request ends some tokens after its last fork and gives back what it holds. Those that are needed for
longer are forked from themselves in time.
"""

from __future__ import annotations

import time
from collections import deque

from pagedinfer.beam_search import BeamSearchParams
from pagedinfer.engine.beam_hypotheses import BeamHypotheses
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.request import Request
from pagedinfer.engine.request_update import RequestUpdate
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.engine.size_limits import max_total_tokens
from pagedinfer.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from pagedinfer.sampling_params import SamplingParams

BEAM = "#beam"
"""Between the id of a search and the number of a beam."""

# A request ends between so many tokens and twice as many after it was forked: few, since admission expects
# each beam to need that much more memory.
_RUN_AHEAD = 8
_NOT_COMPUTED = "beam search got no log-probabilities: the model's logits held NaN or infinities"


class _Beam:
    """One text that lives, and the request that computes its next positions."""

    def __init__(self, request: Request, generated: list[int], cum_logprob: float) -> None:
        self.request = request
        self.generated = generated
        self.cum_logprob = cum_logprob
        # What its request has reported from here on: (the token that it took, the best tokens).
        self.reports: deque[tuple[int, list[tuple[int, float]]]] = deque()


class BeamSearch:
    """The search of one prompt.

    Args:
        request_id: of the search; its beams' ids begin with it.
        prompt, params: what to search, and how.
        eos_token_ids: of the model.
        priority: of all its beams.
        scheduler: runs the beams.

    Raises:
        RequestTooLargeError: a beam can never fit.
    """

    def __init__(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
        priority: int,
        scheduler: Scheduler,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self._prompt = prompt
        self._scheduler = scheduler
        self._sampling: dict[int, SamplingParams] = {}  # by max_tokens
        self._priority = priority
        self._num_requests = 0
        self._num_preemptions = 0
        self._error: str | None = None
        longest = Request(request_id, prompt.token_ids, self._sampling_params(params.max_tokens))
        max_tokens = max_total_tokens(longest, scheduler.config) - len(prompt.token_ids)
        self._hypotheses = BeamHypotheses(params, eos_token_ids, max_tokens)
        self._root = self._request([])
        self._beams: list[_Beam] = []
        self.requests: dict[str, _Beam] = {}  # by id, those that are being computed
        self.metrics = RequestMetrics(arrival_time=self._root.arrival_time, queued_ts=time.monotonic())

    @property
    def finished(self) -> bool:
        return self._hypotheses.finished or self._error is not None

    def start(self) -> None:
        """Queues the prompt."""
        self._scheduler.add_request(self._root)
        self._beams = [_Beam(self._root, [], 0.0)]
        self.requests = {self._root.request_id: self._beams[0]}

    def update(self, update: RequestUpdate) -> None:
        """Takes in what a step gave to one of its beams."""
        beam = self.requests[update.request_id]
        if update.top is None:
            self._error = _NOT_COMPUTED
            self.stop()
            return
        self.metrics.note_tokens_at(time.monotonic())
        (token,) = update.new_token_ids
        beam.reports.append((token, list(zip(update.top.token_ids, update.top.logprobs, strict=True))))
        while not self.finished and all(beam.reports for beam in self._beams):
            self._advance()

    def _advance(self) -> None:
        """All beams have reported a position: decides how to go on, and has it computed."""
        beams = self._beams
        self.metrics.num_generation_tokens += len(beams)
        reports = [beam.reports.popleft() for beam in beams]
        before = [(beam.generated, beam.cum_logprob) for beam in beams]
        living = self._hypotheses.advance(before, [top for _, top in reports])
        if self._hypotheses.finished:
            self.stop()
            return
        self._beams = []
        for each in living:
            beam = beams[each.beam]
            generated = [*before[each.beam][0], each.token_id]
            if each.token_id == reports[each.beam][0] and _goes_on(beam):
                beam.generated, beam.cum_logprob = generated, each.cum_logprob
                self._beams.append(beam)
            else:
                self._beams.append(_Beam(self._fork(beam.request, generated), generated, each.cum_logprob))
        kept = {id(beam) for beam in self._beams}
        for beam in beams:
            if id(beam) not in kept:
                self._abort(beam)
        self.requests = {beam.request.request_id: beam for beam in self._beams}

    def _fork(self, parent: Request, generated: list[int]) -> Request:
        child = self._request(generated)
        if parent.finished:  # it ran ahead, to its end; the prefix cache may have its blocks
            self._scheduler.add_request(child)
        else:
            self._scheduler.fork(parent.request_id, child)
        return child

    def _request(self, generated: list[int]) -> Request:
        number = self._num_requests
        self._num_requests += 1
        max_tokens = (len(generated) // _RUN_AHEAD + 2) * _RUN_AHEAD
        return Request(
            f"{self.request_id}{BEAM}{number}",
            self._prompt.token_ids,
            self._sampling_params(min(max_tokens, self.params.max_tokens)),
            priority=self._priority,
            cache_salt=self._prompt.cache_salt,
            output_token_ids=generated,
            num_logprobs=self._hypotheses.num_candidates,
            needs_known_tokens=True,  # most steps decide which beams go on
        )

    def _sampling_params(self, max_tokens: int) -> SamplingParams:
        if max_tokens not in self._sampling:
            self._sampling[max_tokens] = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
        return self._sampling[max_tokens]

    def _abort(self, beam: _Beam) -> None:
        self._num_preemptions += beam.request.num_preemptions
        self._scheduler.abort_request(beam.request.request_id)

    def stop(self) -> None:
        """Ends all beams and frees what they hold."""
        for beam in self._beams:
            self._abort(beam)
        self._beams, self.requests = [], {}

    def output(self) -> RequestOutput:
        """What it has found: the best text first. Without texts if it was stopped before its end."""
        metrics = self.metrics
        metrics.finished_ts = time.monotonic()
        metrics.num_preemptions = self._num_preemptions
        metrics.num_cached_tokens = self._root.num_cached_tokens
        reason: FinishReason = "error" if self._error is not None else "abort"
        outputs = [
            CompletionOutput(
                index=index,
                text="",
                token_ids=found.token_ids,
                cumulative_logprob=found.cum_logprob,
                finish_reason="stop" if found.ended_by_eos else "length",
            )
            for index, found in enumerate(self._hypotheses.ended)
        ]
        if not self._hypotheses.finished:
            width = self.params.beam_width
            outputs = [CompletionOutput(i, "", [], finish_reason=reason) for i in range(width)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=outputs,
            finished=True,
            metrics=metrics,
            num_cached_tokens=metrics.num_cached_tokens,
            error=self._error,
        )


def _goes_on(beam: _Beam) -> bool:
    """Whether its request has more to report, and will not end with the very next token."""
    request = beam.request
    return bool(beam.reports) or (not request.finished and request.num_tokens + 1 < request.max_total_tokens)
