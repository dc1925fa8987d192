"""Steps of urgent prompts that run beside those under way, rather than behind them."""

from __future__ import annotations

from pagedinfer.engine.batch import Batch, ScheduledRequest
from pagedinfer.engine.forks import PendingForks
from pagedinfer.engine.preemption import Preemption
from pagedinfer.engine.request import Request
from pagedinfer.engine.step_planner import SHORT_PROMPT, Step, StepPlanner


class UrgentLane:
    """Plans steps of one short prompt that is more urgent than somebody who runs.

    Such a step waits for none of those under way, and all that are launched later wait for it. So it may use
    any block with which those under way have nothing to do (see `UnsettledBlocks`), and nobody else has to
    know of it. The request takes no slot: meanwhile it waits in its place, with KV of its own as a fork may
    have, and a token that is not known yet; with that token it is admitted like any other, or has ended.

    Whatever is not as simple as that takes its turn in the next step.
    """

    def __init__(self, planner: StepPlanner, preemption: Preemption, forks: PendingForks) -> None:
        self._planner = planner
        self._preemption = preemption
        self._forks = forks
        self._under_way: int | None = None  # the number of its step
        self._refused: tuple[Request, int] | None = None  # and at which step: one look at each

    def plan(self, number: int) -> Step | None:
        """Step `number`, of the first waiting request; None: there is nobody for whom it can be made."""
        if self._under_way is not None or not self._planner.waiting:
            return None
        request = self._planner.waiting.first()
        if self._refused == (request, number):
            return None
        if not (self._may_take(request, number) and self._admit(request)):
            self._refused = (request, number)
            return None
        self._under_way = self._planner.last_alone = number
        start, request.num_computed_tokens = request.num_computed_tokens, request.num_tokens
        work = ScheduledRequest(request.request_id, 0, start, request.num_tokens - start, True, [])
        batch = Batch(number, released_slots=[0], admitted=[request.admitted(slot=0)], requests=[work])
        request.num_tokens += 1
        self._planner.kv.end_step(batch)
        self._planner.counters.count_batch(batch, work.num_tokens)
        return Step(batch, 0, sampling=[request])

    def _admit(self, request: Request) -> bool:
        """Gives it KV for all its tokens; False, and nothing has changed: it is too long, or lacks room."""
        planner, kv = self._planner, self._planner.kv
        prefix = planner.find_prefix(request)
        num_tokens = request.num_tokens - len(prefix) * kv.block_size
        peers = planner.running.num_at_least_as_urgent(request.urgency[0])
        if (
            num_tokens > min(SHORT_PROMPT, planner.config.max_num_batched_tokens)
            or kv.num_needed(request, prefix, request.num_tokens) > kv.num_free
            or not planner.will_fit(request, prefix, peers)
            or not kv.admit_settled(request, prefix)
        ):
            return False
        planner.note_admission(request, prefix)
        self._preemption.holding[request] = None
        return True

    def _may_take(self, request: Request, number: int) -> bool:
        running = self._planner.running
        if running.num_at_least_as_urgent(request.urgency[0]) == len(running):
            return False
        if number <= self._planner.last_alone + 1:
            return False  # the less urgent keep half of their pace, as with steps that others have alone
        return not (
            request.block_ids  # a fork, or what had its turn here
            or request.cpu_block_ids
            or request.has_unknown_tokens
            or request.needs_known_tokens
            or request.skip_reading_prefix_cache  # the log-probabilities of its prompt are asked for
            or request in self._forks
        )

    def end(self, step: int) -> bool:
        """A step's results are there; whether it was one of these."""
        if step != self._under_way:
            return False
        self._under_way = None
        return True
