"""What happened to one request of a trace, and why, in sentences."""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass

from pagedinfer.engine.decisions import Preempted, Refusal, RefusalCause
from pagedinfer.tracing.records import Added, Ended, StepRecord, Trace

_CAUSES: dict[RefusalCause, str] = {
    "prefix": "a prompt that begins alike was being computed, and to share it is quicker",
    "urgent": "a more urgent prompt had the step",
    "unknown token": "the step before was still drawing its last token",
}
_USED_UP = "others took the {:,} tokens of a step (max_num_batched_tokens)"
_SLOW = 3.0  # a step that takes so many times the median step between two tokens is worth a sentence


@dataclass(slots=True)
class _Life:
    """One request, from its arrival to its end or the trace's."""

    added: Added
    ended: Ended | None
    steps: list[StepRecord]  # those that were scheduled meanwhile


def explain(trace: Trace, request_id: str) -> list[str]:
    """Sentences on why a request waited, was preempted, was slow, or was refused, in order of time.

    Raises:
        ValueError: the trace has no such request; the message names the nearest.
    """
    refusals = [(when, message) for when, name, message in trace.refused if name == request_id]
    lives = _lives(trace, request_id)
    if not lives and not refusals:
        names = [added.request_id for added in trace.added] + [name for _, name, _ in trace.refused]
        nearest = difflib.get_close_matches(request_id, names, n=3)
        hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
        raise ValueError(f"the trace has no request {request_id!r}{hint}")
    sentences = [
        f"At {_time(when)} it was refused, since it could never run: {message}." for when, message in refusals
    ]
    for life in lives:
        sentences += _Explanation(trace, life).sentences()
    return sentences


def _lives(trace: Trace, request_id: str) -> list[_Life]:
    lives = []
    ends = sorted(trace.ended.get(request_id, []), key=lambda ended: ended.op)
    for added in trace.added:
        if added.request_id != request_id:
            continue
        ended = next((ended for ended in ends if ended.op > added.op), None)
        last = float("inf") if ended is None else ended.op
        steps = [step for step in trace.steps if added.op < step.ops[0] <= last]
        lives.append(_Life(added, ended, steps))
    return lives


class _Explanation:
    """Goes through the steps of a request's life and tells of each change."""

    def __init__(self, trace: Trace, life: _Life) -> None:
        self._trace = trace
        self._life = life
        self._name = life.added.request_id
        self._said: list[str] = []
        self._has_slot = False
        self._loading: set[int] = set()  # steps in which it waited for its KV from the CPU

    def sentences(self) -> list[str]:
        added, ended = self._life.added, self._life.ended
        self._say(self._arrival(added))
        waiting: list[StepRecord] = []  # steps since it was last put into the queue
        running: list[StepRecord] = []  # steps since it last got a slot
        since = added.time
        loading = False
        for step in self._life.steps:
            if self._name in step.swapping_in:
                self._tell_wait(waiting, since, step)
                self._say(
                    f"In step {step.number} it got a slot. Its KV comes from the CPU: {step.swaps[1]} blocks "
                    f"move while others run."
                )
                waiting, since, loading = [], step.time, True
                continue
            if self._name in step.admitted:
                self._tell_wait(waiting, since, step)
                self._tell_admission(step)
                waiting, loading = [], False
            preempted = next((p for p in step.preempted if p[0] == self._name), None)
            if preempted is not None:
                self._tell_work(running)
                self._tell_preemption(step, Preempted(*preempted))
                waiting, running, since, loading = [], [], step.time, False
            elif self._has_slot:
                running.append(step)
                if loading:
                    self._loading.add(step.number)
            else:
                waiting.append(step)
        if waiting and not running:
            self._tell_wait(waiting, since, None)
        self._tell_work(running)
        self._say(self._end(added, ended))
        return self._said

    def _say(self, sentence: str) -> None:
        self._said.append(sentence)

    # ---- from its arrival to its first step ----

    def _arrival(self, added: Added) -> str:
        what = f"a prompt of {added.num_prompt_tokens:,} tokens"
        if added.num_given_tokens:
            what += f" and {added.num_given_tokens} generated ones"
        limit = "" if added.max_tokens is None else f", to generate at most {added.max_tokens:,}"
        priority = (
            f", priority {added.priority}" if self._trace.config["scheduling_policy"] == "priority" else ""
        )
        parent = "" if added.parent is None else f" It shares the KV of {added.parent}."
        return f"{self._name} arrived at {_time(added.time)} with {what}{limit}{priority}.{parent}"

    def _tell_wait(self, waiting: list[StepRecord], since: float, until: StepRecord | None) -> None:
        """Why it was not admitted in these steps."""
        self._has_slot = until is not None
        if not waiting:
            return
        end = waiting[-1].time if until is None else until.time
        reasons: Counter[str] = Counter(self._reason(step) for step in waiting)
        parts = [f"{reason} ({_steps(count)})" for reason, count in reasons.most_common()]
        verb = "It has been waiting" if until is None else "It waited"
        self._say(f"{verb} for {_duration(end - since)}: " + "; ".join(parts) + ".")

    def _reason(self, step: StepRecord) -> str:
        if step.refusal is None:
            return "a step short of blocks took no newcomers"
        refusal = Refusal(*step.refusal)
        config = self._trace.config
        text = {
            "slots": f"all {config['max_num_seqs']} slots (max_num_seqs) were taken by requests as urgent",
            "tokens": _USED_UP.format(config["max_num_batched_tokens"]),
            "blocks": "too little KV cache was free",
        }[refusal.reason]
        if refusal.reason == "blocks" and refusal.peak:
            text = (
                f"with it, the KV cache of {config['num_blocks']:,} blocks was expected to run out as those "
                f"that run grow"
            )
        if refusal.cause:
            text = _CAUSES[refusal.cause]
        if refusal.request_id != self._name:
            return f"others were in front of it, the first of which waited since {text}"
        if refusal.reason == "blocks" and not refusal.peak:
            text += f", {refusal.num_free:,} blocks where it needed {refusal.num_needed:,}"
        return text

    def _tell_admission(self, step: StepRecord) -> None:
        chunk = next((chunk for chunk in step.chunks if chunk[0] == self._name), None)
        if chunk is None:
            self._say(f"In step {step.number}, at {_time(step.time)}, it got a slot and went on.")
            return
        _, start, count = chunk
        cached = f"; {start:,} were in the prefix cache" if start else ""
        total = self._life.added.num_prompt_tokens
        self._say(
            f"In step {step.number}, at {_time(step.time)}, it got a slot: {count:,} of its {total:,} prompt "
            f"tokens were computed{cached}."
        )

    # ---- while it runs ----

    def _tell_work(self, running: list[StepRecord]) -> None:
        prompt_steps = [step for step in running if any(chunk[0] == self._name for chunk in step.chunks)]
        if len(prompt_steps) > 1:
            first = next(chunk for chunk in prompt_steps[0].chunks if chunk[0] == self._name)
            self._say(
                f"Its prompt took {len(prompt_steps)} steps, {_duration(_sum(prompt_steps))}: a step has "
                f"room for {first[2]:,} of its tokens (max_num_batched_tokens, long_prefill_token_threshold)."
            )
        idle = Counter(self._idle_reason(step) for step in running if self._name in step.idle)
        if idle:
            parts = [f"{reason} ({_steps(count)})" for reason, count in idle.most_common()]
            self._say("It had a slot and computed nothing: " + "; ".join(parts) + ".")
        decodes = [step for step in running if step not in prompt_steps and step.seconds > 0]
        if len(decodes) < 3:
            return
        durations = sorted(step.seconds for step in decodes)
        median = durations[len(durations) // 2]
        slowest = max(decodes, key=lambda step: step.seconds)
        self._say(f"It then ran for {_steps(len(decodes))} of {_duration(median)} at the median.")
        if slowest.seconds > _SLOW * median:
            self._say(
                f"The longest time between two of its tokens was step {slowest.number}, "
                f"{_duration(slowest.seconds)}: {_content(slowest)}."
            )

    def _idle_reason(self, step: StepRecord) -> str:
        config = self._trace.config
        if step.number in self._loading:
            return "its KV was on its way"
        if step.num_tokens >= config["max_num_batched_tokens"]:
            return _USED_UP.format(config["max_num_batched_tokens"])
        if config["scheduling_policy"] == "priority" and step.chunks:
            return _CAUSES["urgent"]
        return "no block of the KV cache was left for it"

    def _tell_preemption(self, step: StepRecord, preempted: Preempted) -> None:
        self._has_slot = False
        lack = "needed a slot" if preempted.lack == "slots" else "needed blocks"
        order = (
            "was the least urgent" if self._trace.config["scheduling_policy"] == "priority" else "came last"
        )
        what = (
            f"its {preempted.num_blocks} blocks moved to the CPU"
            if preempted.kind == "swap"
            else f"the KV of its {preempted.num_tokens:,} tokens was dropped, to be computed again"
        )
        self._say(
            f"In step {step.number}, at {_time(step.time)}, it was preempted: {preempted.by} {lack}, and of "
            f"those that ran it {order}; {what}."
        )

    # ---- its end ----

    def _end(self, added: Added, ended: Ended | None) -> str:
        if ended is None:
            return "It had not ended when the trace did."
        took = _duration(ended.time - added.time)
        how = {
            "stop": "stopped of its own accord",
            "length": "reached its most tokens",
            "abort": "was aborted",
            "error": "failed: no token could be sampled",
        }[ended.reason]
        return f"It {how} at {_time(ended.time)}, after {ended.num_output_tokens:,} tokens and {took} in all."


def _content(step: StepRecord) -> str:
    """What made a step long."""
    prompts = sorted(step.chunks, key=lambda chunk: -chunk[2])
    parts = []
    if prompts:
        total = sum(chunk[2] for chunk in prompts)
        names = ", ".join(chunk[0] for chunk in prompts[:3]) + (" and others" if len(prompts) > 3 else "")
        parts.append(f"it computed {total:,} prompt tokens of {names} beside it")
    if step.swaps[1]:
        parts.append(f"{step.swaps[1]} blocks came from the CPU")
    return (
        ", and ".join(parts) or f"it had {step.num_requests} requests and no prompt; the time went elsewhere"
    )


def _sum(steps: list[StepRecord]) -> float:
    return sum(step.seconds for step in steps)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
