"""Fills one step: which requests get how many tokens, who is admitted, who has to give way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from pagedinfer.engine.admission import AdmissionControl
from pagedinfer.engine.batch import Batch, ScheduledRequest
from pagedinfer.engine.decisions import Refusal, RefusalCause, WaitingReason
from pagedinfer.engine.kv_cache_manager import KVCacheManager, Prefix
from pagedinfer.engine.preemption import Preemption
from pagedinfer.engine.request import Request, RequestStatus
from pagedinfer.engine.request_queue import RequestQueue
from pagedinfer.engine.running_requests import RunningRequests
from pagedinfer.engine.scheduler_config import SchedulerConfig
from pagedinfer.engine.shared_prefixes import SharedPrefixes
from pagedinfer.engine.stats import SchedulerCounters

_RETRY_STEPS = 16  # after so many steps a refused request is looked at again, whatever happened

# Tokens of prompts that a step computes beside one that is more urgent. So many change its duration little:
# up to some 200 tokens (arithmetic over bandwidth, 16-bit) a GPU waits for the weights, not for the products.
_TOKENS_BESIDE_URGENT = 256

# An urgent prompt of so few tokens has a step to itself. Beside some hundred decodes it would take twice as
# long (Llama-3-8B on an H200, 128 tokens and 255 decodes: 15 ms for 10), and its first token with it.
SHORT_PROMPT = 256

_NO_BLOCKS: list[int] = []

# Seconds that a step may wait for blocks from the CPU, rather than the request for the next step.
_BRIEF = 1e-3


@dataclass(slots=True)
class Step:
    """A step while it is being scheduled."""

    batch: Batch
    budget: int  # tokens that may still be added
    sampling: list[Request] = field(default_factory=list)  # those that draw a token
    short_of_blocks: bool = False  # somebody was preempted or got no block: no time for newcomers
    num_awaited_blocks: int = 0  # that come from the CPU and that it waits for
    wait_for_swaps: bool = False  # nothing else can run: those swapping in may as well
    prompt_priority: int | None = None  # of the most urgent request that has more than one token in it
    budget_beside: int = _TOKENS_BESIDE_URGENT  # of such tokens for those that are less urgent
    unfinished_prompts: list[Request] = field(default_factory=list)  # those it computes a part of


class StepPlanner:
    """Plans steps over the requests that a scheduler holds."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: RunningRequests,
        waiting: RequestQueue,
        preemption: Preemption,
        admission: AdmissionControl,
        counters: SchedulerCounters,
    ) -> None:
        self.config = config
        self.kv = kv
        self.running = running
        self.waiting = waiting
        self.preemption = preemption
        self.admission = admission
        self.counters = counters
        self.refusal: Refusal | None = None  # of the first waiting request, if it was looked at
        self._prefixes = SharedPrefixes(running, config.block_size) if config.cascade_attention else None
        self.swaps_in_done = 0  # the last step whose swaps in, and all before, have ended
        self._refused: tuple[Request, int] | None = None  # and the admission's events by then
        self._retry_step = 0
        self.last_alone = 0  # the last step that the less urgent sat out

    def plan(self, number: int) -> Step:
        """Step `number`. Requests that are preempted for it are not in it."""
        step = Step(Batch(number), self.config.max_num_batched_tokens)
        self.preemption.preempted = []
        first = 0
        if self.waiting and self.config.scheduling_policy == "priority":
            first = self._schedule_urgent(step)
        if self._is_for_urgent_alone(step, first):
            self.last_alone = number
            step.budget_beside = 0
        else:
            self._schedule_running(step, first, len(self.running))
        if step.short_of_blocks or not self.waiting:
            self.refusal = None
        else:
            while not step.short_of_blocks and self.waiting and self._admit_first(step):
                pass
        if not step.batch.requests and any(r.status is RequestStatus.SWAPPING_IN for r in self.running):
            step.wait_for_swaps = True
            self._schedule_running(step, 0, len(self.running))
        batch = step.batch
        num_requests = len(batch.requests)
        if self._prefixes is not None and not batch.admitted and len(step.sampling) == num_requests:
            num_tokens = self.config.max_num_batched_tokens - step.budget
            if num_tokens == num_requests > 1:  # decodes alone
                batch.shared_prefixes = self._prefixes.arrange(batch.requests, step.sampling)
        self.kv.end_step(step.batch)
        self.counters.count_batch(step.batch, self.config.max_num_batched_tokens - step.budget)
        return step

    @property
    def waiting_reason(self) -> WaitingReason:
        """What the first waiting request lacks."""
        return "blocks" if self.refusal is None else self.refusal.reason

    # ---- those that run ----

    def _schedule_urgent(self, step: Step) -> int:
        """Admits those that are strictly more urgent than somebody running, if need be in their place.

        Requests that run and are at least as urgent go first. Returns how many of the running ones,
        from the front on, have had their turn.
        """
        done = 0
        while self.waiting and done < len(self.running):
            request = self.waiting.first()
            peers = self.running.num_at_least_as_urgent(request.urgency[0])
            if peers == len(self.running):
                break
            self._schedule_running(step, done, peers)
            done = min(peers, len(self.running))
            if self.waiting.first() is not request:
                continue  # one of them had to give way, and is first now
            if not self._admit_first(step):
                break
            done += 1
        return done

    def _is_for_urgent_alone(self, step: Step, first: int) -> bool:
        """Whether the running requests from `first` on, all less urgent than a prompt in it, sit a step out.

        Never twice in a row, so that they keep half of their pace however many urgent ones come.
        """
        num_tokens = self.config.max_num_batched_tokens - step.budget
        return (
            step.prompt_priority is not None
            and not step.unfinished_prompts
            and num_tokens <= SHORT_PROMPT
            and first < len(self.running)
            and step.batch.step > self.last_alone + 1
        )

    def _schedule_running(self, step: Step, first: int, last: int) -> None:
        """Gives running requests `first` to `last` their next tokens, while budget and blocks last."""
        running = self.running.by_urgency
        scheduled, sampling = step.batch.requests, step.sampling
        swapping = RequestStatus.SWAPPING_IN
        decodes_behind: int | None = None  # running requests behind this one that want a single token
        # Preemption takes requests off the end of the list, and so ends this loop early.
        for index, request in enumerate(islice(running, first, last), start=first + 1):
            if step.budget <= 0:
                break
            swapping_in = request.status is swapping
            if swapping_in and not self._has_arrived(step, request):
                continue
            start = request.num_computed_tokens
            num_tokens = request.num_tokens - start
            has_room = start < request.capacity and start + 1 < request.max_total_tokens
            if num_tokens == 1 and has_room and not swapping_in:
                # What `_compute` would do for a decode with room. All that most requests need in most steps.
                if decodes_behind is not None:
                    decodes_behind -= 1
                step.budget -= 1
                request.num_computed_tokens = start + 1
                request.num_tokens = start + 2
                sampling.append(request)
                scheduled.append(
                    ScheduledRequest(request.request_id, request.slot, start, 1, True, _NO_BLOCKS)
                )
                continue
            if num_tokens > 1:
                if decodes_behind is None:
                    decodes_behind = _num_decodes(running, index)
                # A long prompt leaves those behind it their next token, and gets one itself at least.
                num_tokens = self._chunk(step, request, num_tokens, decodes_behind)
                if num_tokens == 0:
                    continue
            else:
                if decodes_behind is not None:
                    decodes_behind -= 1
                if request.num_tokens == request.max_total_tokens:
                    continue  # a step in flight is drawing its last token
            new_blocks: list[int] = []
            if start + num_tokens > request.capacity:
                if not self._make_room(step, request, start + num_tokens):
                    break
                new_blocks = self.kv.grow(request, start + num_tokens)
            if swapping_in:
                self._start(step, request, num_tokens)
            else:
                self._compute(step, request, num_tokens, new_blocks)

    def _has_arrived(self, step: Step, request: Request) -> bool:
        """Whether a request that is swapping in may run without the step having to wait for its KV."""
        return step.wait_for_swaps or request.swap_in_step <= self.swaps_in_done

    def _compute(self, step: Step, request: Request, num_tokens: int, new_blocks: list[int]) -> None:
        """Puts the next `num_tokens` tokens of a running request into the step."""
        start = request.num_computed_tokens
        end = start + num_tokens
        step.budget -= num_tokens
        request.num_computed_tokens = end
        sample = end == request.num_tokens
        if sample:
            request.num_tokens = end + 1
            step.sampling.append(request)
        if num_tokens > 1:
            self._note_prompt(step, request, num_tokens)
            if not sample:
                step.unfinished_prompts.append(request)
            if end >= request.next_cacheable:
                self.kv.cache_full_blocks(request)  # a decode's block is cached when its token is known
        step.batch.requests.append(
            ScheduledRequest(request.request_id, request.slot, start, num_tokens, sample, new_blocks)
        )

    def _chunk(self, step: Step, request: Request, num_tokens: int, reserved: int) -> int:
        """How many of a prompt's next `num_tokens` tokens this step computes; 0 if it has to wait.

        `reserved` tokens are for others, but one at least is for this prompt.
        """
        chunked = self.config.enable_chunked_prefill
        limit = max(1, step.budget - reserved) if chunked else step.budget
        if num_tokens > 1 and step.prompt_priority is not None and request.urgency[0] > step.prompt_priority:
            limit = min(limit, step.budget_beside)
        if not chunked:
            return num_tokens if num_tokens <= limit else 0
        if self.config.long_prefill_token_threshold:
            num_tokens = min(num_tokens, self.config.long_prefill_token_threshold)
        return min(num_tokens, limit)

    def _note_prompt(self, step: Step, request: Request, num_tokens: int) -> None:
        """The step computes more than one token of `request`, and those less urgent have to leave it time."""
        priority = request.urgency[0]
        if step.prompt_priority is None or priority < step.prompt_priority:
            step.prompt_priority = priority
        elif priority > step.prompt_priority:
            step.budget_beside -= num_tokens

    # ---- too few blocks ----

    def _make_room(self, step: Step, request: Request, num_tokens: int) -> bool:
        """Preempts from the least urgent on until `request` can grow; False if it is itself the last.

        It then keeps what it holds and waits: whoever is more urgent may still take its blocks.
        """
        needed = self.kv.blocks_for(num_tokens - request.capacity)
        if self.kv.num_free < needed:
            self.preemption.shed_forks(None)
        while self.kv.num_free < needed:
            step.short_of_blocks = True
            if self.running.least_urgent is request:
                self.counters.num_stalls += 1
                return False
            self.preemption.preempt(self.running.least_urgent, request, "blocks")
            self.admission.observe_preemption()
        return True

    def _find_more_room(self, step: Step, request: Request, num_needed: int) -> bool:
        """Takes a slot or blocks from somebody else for a waiting request; False if nobody has to give way.

        Somebody is the least urgent one running, if `request` is strictly more urgent; nobody is
        preempted if even all of its kind together could not make room.
        """
        if not self.running:
            # Only forks that wait hold blocks: the others give theirs back first, then `request`
            # itself, if the copy of a block that it shares is one too many.
            return self.preemption.shed_forks(request) or self.preemption.shed_forks(None)
        victims = self.running.by_urgency[self.running.num_at_least_as_urgent(request.urgency[0]) :]
        num_gained = sum(len(victim.block_ids) for victim in victims)
        if not victims or num_needed > self.kv.num_free + num_gained:
            return False
        lack: WaitingReason = "blocks" if self.running.has_free_slot else "slots"
        self.preemption.preempt(victims[-1], request, lack)
        step.short_of_blocks = True
        self.counters.num_displaced += 1
        return True

    # ---- admission ----

    def _admit_first(self, step: Step) -> bool:
        """Admits the first waiting request; False if it has to go on waiting."""
        request = self.waiting.first()
        if request.has_unknown_tokens:
            # It was preempted while a step in flight draws its token.
            return self._refuse(request, "blocks", cause="unknown token")
        if step.budget <= 0:
            return self._refuse(request, "tokens")
        peers = self.running.num_at_least_as_urgent(request.urgency[0])
        if not self.running.has_free_slot and peers == len(self.running):
            return self._refuse(request, "slots")
        refusal = (request, self.admission.num_events)
        if self.running and self._refused == refusal and step.batch.step < self._retry_step:
            return False
        reserved = _num_decodes(self.running.by_urgency, peers)  # next tokens of the less urgent
        while True:
            prefix = self.find_prefix(request)
            start = max(request.num_computed_tokens, len(prefix) * self.kv.block_size)
            num_tokens = self._chunk(step, request, request.num_tokens - start, reserved)
            if num_tokens == 0:
                has_room = self.config.enable_chunked_prefill or request.num_tokens - start <= step.budget
                return self._refuse(request, "tokens", cause="urgent" if has_room else "")
            # What a running prompt is about to compute is worth waiting for: both would compute it.
            if any(self.kv.will_find(request, prefix, other) for other in step.unfinished_prompts):
                return self._refuse(request, "tokens", cause="prefix")
            num_needed = self.kv.num_needed(request, prefix, start + num_tokens)
            fits = self.will_fit(request, prefix, peers)
            if fits and num_needed <= self.kv.num_free and self.running.has_free_slot:
                break
            # Whatever gives blocks back may change what the prefix cache has: look again after it.
            if not (fits and self._find_more_room(step, request, num_needed)):
                self._refused, self._retry_step = refusal, step.batch.step + _RETRY_STEPS
                is_forecast = (
                    not fits and self.config.admission_policy == "forecast" and num_needed <= self.kv.num_free
                )
                peak = math.ceil(self.admission.last_peak) if is_forecast else 0
                reason: WaitingReason = "blocks" if self.running.has_free_slot else "slots"
                return self._refuse(request, reason, num_needed, peak)
        self._refused = None
        self._admit(step, request, prefix, num_tokens)
        return True

    def _refuse(
        self,
        request: Request,
        reason: WaitingReason,
        num_needed: int = 0,
        peak: int = 0,
        cause: RefusalCause = "",
    ) -> Literal[False]:
        self.refusal = Refusal(request.request_id, reason, num_needed, self.kv.num_free, peak, cause)
        return False

    def find_prefix(self, request: Request) -> Prefix:
        """The known blocks with which a waiting request is to begin."""
        prefix = self.kv.find_prefix(request)
        num_behind = len(prefix.cpu_blocks)
        if num_behind and not self.preemption.costs.prefer_fetch(num_behind, num_behind * self.kv.block_size):
            prefix = Prefix(prefix.blocks, [])
        return prefix

    def will_fit(self, request: Request, prefix: Prefix, peers: int) -> bool:
        """Whether there will be room for `request` as it and those `peers` that it cannot displace grow."""
        running = self.running.by_urgency
        limits = self.running.num_limit_tokens
        if peers == 0 or self.admission.fits_at_worst(request, len(running), limits):
            return True
        num_shared = request.num_shared_blocks or len(prefix.blocks)
        num_own = self.kv.blocks_for(request.num_tokens) - num_shared
        num_used = self.config.num_blocks - self.kv.num_free
        num_used += self.kv.num_needed(request, prefix, request.num_tokens)
        num_used -= sum(len(other.block_ids) - other.num_shared_blocks for other in running[peers:])
        return self.admission.fits(running[:peers], request, num_own, num_used)

    def _admit(self, step: Step, request: Request, prefix: Prefix, num_tokens: int) -> None:
        """Gives the first waiting request a slot and its next `num_tokens` tokens.

        If so much of its KV has to come from the CPU that the step would be held up, it gets the tokens
        once that has arrived.
        """
        self.waiting.pop()
        self.preemption.leave_queue(request)
        self.note_admission(request, prefix)
        start = max(request.num_computed_tokens, len(prefix) * self.kv.block_size)
        num_awaited = step.num_awaited_blocks + self.kv.admit(request, prefix, start + num_tokens)
        self.running.add(request)
        if self.preemption.costs.transfer_seconds(num_awaited) <= _BRIEF:
            step.num_awaited_blocks = num_awaited
            self._start(step, request, num_tokens)
        else:
            request.status = RequestStatus.SWAPPING_IN
            request.swap_in_step = step.batch.step

    def note_admission(self, request: Request, prefix: Prefix) -> None:
        """A request begins with `prefix`; counted the first time."""
        if request.is_new:
            request.is_new = False
            request.num_cached_tokens = len(prefix) * self.kv.block_size
            self.counters.count_admission(request, len(prefix.cpu_blocks) * self.kv.block_size)

    def _start(self, step: Step, request: Request, num_tokens: int) -> None:
        """Hands a request that has a slot to the runner, with its next `num_tokens` tokens."""
        self.kv.end_swap_in(request)
        request.status = RequestStatus.RUNNING
        step.batch.admitted.append(request.admitted(request.slot))
        self._compute(step, request, num_tokens, [])


def _num_decodes(requests: list[Request], first: int) -> int:
    """How many from `first` on want a single token."""
    return sum(r.num_tokens - r.num_computed_tokens == 1 for r in requests[first:])
