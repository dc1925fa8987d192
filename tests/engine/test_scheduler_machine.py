"""The scheduler under random calls, on a runner that checks all the KV that would be read."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.request import Request, RequestStatus
from tests.engine.rig import Rig

MAX_MODEL_LEN = 24


class Launched:
    """A step that the runner has been given. It executes steps one after another, in its own time."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.output: StepOutput | None = None


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, forks, aborts, steps and resets; up to two steps in flight, and an urgent one beside them."""

    @initialize(
        limits=st.fixed_dictionaries(
            {
                "max_num_seqs": st.sampled_from([1, 3, 5]),
                "max_num_batched_tokens": st.sampled_from([64, 9, 5, 1]),
                "block_size": st.sampled_from([1, 2, 4]),
                "num_cpu_blocks": st.sampled_from([0, 1, 3, 8, 30]),
                "enable_prefix_caching": st.booleans(),
                "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
                "preemption_mode": st.sampled_from(["auto", "swap", "recompute"]),
                "admission_policy": st.sampled_from(["forecast", "greedy"]),
                "long_prefill_token_threshold": st.sampled_from([0, 3]),
                "urgent_lane": st.booleans(),
            }
        ),
        spare=st.sampled_from([0, 1, 4, 40]),
        overlap=st.integers(0, 2),
        swap_in_steps=st.integers(0, 3),
    )
    def start(self, limits: dict[str, Any], spare: int, overlap: int, swap_in_steps: int) -> None:
        num_blocks = -(-MAX_MODEL_LEN // limits["block_size"]) + spare
        self.rig = Rig(swap_in_steps, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, **limits)
        self.scheduler = self.rig.scheduler
        if swap_in_steps:  # so slow that no step waits for one, and recomputation is slower still
            self.scheduler.costs.swap_bytes_per_second = 1.0
            self.scheduler.costs.prefill_tokens_per_second = 1e-9
        self.overlap = overlap
        self.in_flight: list[Launched] = []
        self.to_execute: deque[Launched] = deque()
        self.urgent: Launched | None = None
        self.num_urgent = 0
        self.num_added = 0

    def new_id(self) -> str:
        self.num_added += 1
        return f"r{self.num_added}"

    def stream(self) -> int | None:
        """Of the request with the last new id: every second one has one."""
        return self.num_added if self.num_added % 2 else None

    def unfinished(self, which: int) -> Request | None:
        requests = list(self.scheduler.requests.values())
        return requests[which % len(requests)] if requests else None

    # ---- what may happen ----

    @rule(
        prompt=st.sampled_from([1, 8, 8, 13]).flatmap(
            lambda length: st.lists(st.integers(0, 1), min_size=length, max_size=length)
        ),
        max_tokens=st.sampled_from([1, 7, 9]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "s"]),
        eos=st.sampled_from([frozenset(), frozenset(range(3))]),
        seed=st.integers(0, 3),
    )
    def add(self, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        fields["cache_salt"] = fields.pop("salt")
        fields["eos_token_ids"] = fields.pop("eos")
        self.rig.add(self.new_id(), prompt, max_tokens=max_tokens, stream=self.stream(), **fields)

    @rule(which=st.integers(0, 100), n=st.integers(1, 3), max_tokens=st.integers(1, 9))
    def more_choices(self, which: int, n: int, max_tokens: int) -> None:
        parent = self.unfinished(which)
        if parent is None:
            return
        for seed in range(n):
            self.rig.fork(
                parent.request_id,
                self.new_id(),
                parent.prompt_token_ids,
                max_tokens=max_tokens,
                seed=100 + seed,
                cache_salt=parent.cache_salt,
                stream=self.stream(),
            )

    @rule(which=st.integers(0, 100), token=st.integers(0, 49), end_parent=st.booleans())
    def beam(self, which: int, token: int, end_parent: bool) -> None:
        parent = self.unfinished(which)
        if parent is None or parent.num_output_tokens == 0:
            return
        self.rig.fork(
            parent.request_id,
            self.new_id(),
            parent.prompt_token_ids,
            output_token_ids=[*parent.output_token_ids[:-1], token],
            max_tokens=parent.num_output_tokens + 3,
            cache_salt=parent.cache_salt,
        )
        if end_parent:
            self.scheduler.abort_request(parent.request_id)

    @rule(which=st.integers(0, 100), really=st.sampled_from([False, False, True]))
    def abort(self, which: int, really: bool) -> None:
        request = self.unfinished(which)
        if request is not None and really:
            assert self.scheduler.abort_request(request.request_id)
            assert not self.scheduler.abort_request(request.request_id)
            assert request.block_ids == request.cpu_block_ids == []

    @rule(which=st.integers(0, 100), really=st.sampled_from([False, False, True]))
    def fails_to_sample(self, which: int, really: bool) -> None:
        request = self.unfinished(which)
        if request is not None and really:
            self.rig.runner.forced_tokens[request.request_id] = [-1]

    @rule(really=st.sampled_from([False, False, True]))
    def reset_prefix_cache(self, really: bool) -> None:
        if really:
            self.scheduler.reset_prefix_cache()

    @rule(swap_rate=st.sampled_from([1.0, 1e15]))
    def costs_change(self, swap_rate: float) -> None:
        self.scheduler.costs.swap_bytes_per_second = swap_rate

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def abort_all(self, really: bool) -> None:
        if really:
            self.scheduler.abort_all()
            self.forget_launched()

    @rule(launched=st.booleans(), really=st.sampled_from([False] * 3 + [True]))
    def step_fails(self, launched: bool, really: bool) -> None:
        """The oldest step under way gives no result; or a new one cannot be launched, behind the others."""
        if not really:
            return
        if launched and self.in_flight:
            failed = self.in_flight.pop(0).batch
        else:
            failed = self.scheduler.schedule()
            for earlier in self.in_flight:
                self.update(earlier)
        self.forget_launched()
        if failed.requests:
            before = {name: request.token_ids.copy() for name, request in self.scheduler.requests.items()}
            ids = {work.request_id for work in failed.requests}
            ended = self.scheduler.recover(ids)
            assert {request.request_id for request in ended} == ids & set(before)
            kept = {name: request.token_ids for name, request in self.scheduler.requests.items()}
            assert kept == {name: tokens for name, tokens in before.items() if name not in ids}
        else:
            self.scheduler.abort_all()

    @rule(first=st.booleans())
    def urgent_step(self, first: bool) -> None:
        """Beside those in flight: before all that is left of them (`first`), or behind them."""
        batch = self.scheduler.schedule_urgent()
        if batch is None:
            return
        assert self.urgent is None
        self.num_urgent += 1
        if not first or self.moves_wait(batch):
            self.execute_all()
        self.urgent = Launched(batch)
        self.urgent.output = self.rig.runner.execute_urgent(batch).result()

    def moves_wait(self, batch: Batch) -> bool:
        """Whether it writes CPU blocks that steps before it move: moves begin in the order of launches."""
        before = [step.batch for step in self.to_execute]
        moved = {to for each in before for _, to in each.swaps_out}
        moved.update(source for each in before for source, _ in each.swaps_in)
        return not moved.isdisjoint(to for _, to in batch.swaps_out)

    @rule()
    def urgent_result(self) -> None:
        if self.urgent is not None:
            urgent, self.urgent = self.urgent, None
            self.update(urgent)

    def execute_all(self) -> None:
        while self.to_execute:
            step = self.to_execute.popleft()
            step.output = self.rig.runner.execute(step.batch).result()

    def update(self, step: Launched) -> None:
        if step.output is None:
            self.execute_all()
        assert step.output is not None
        self.rig.update(step.batch, step.output)

    def forget_launched(self) -> None:
        """Nobody looks at their results any more; the runner executes them all the same."""
        self.in_flight.clear()
        self.urgent = None

    @rule(times=st.integers(1, 3))
    def steps(self, times: int) -> None:
        self.step(times)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    def one_step(self) -> None:
        scheduler = self.scheduler
        before = {request: request.num_preemptions for request in scheduler.requests.values()}
        batch = scheduler.schedule()
        preempted = [request for request, count in before.items() if request.num_preemptions > count]
        self.check_batch(batch, preempted)
        if not batch.is_empty():
            self.in_flight.append(Launched(batch))
            self.to_execute.append(self.in_flight[-1])
        while len(self.in_flight) > self.overlap or (batch.is_empty() and self.in_flight):
            self.update(self.in_flight.pop(0))
        if batch.is_empty():
            self.urgent_result()

    # ---- what must hold ----

    def check_batch(self, batch: Batch, preempted: list[Request]) -> None:
        scheduler = self.scheduler
        ids = [work.request_id for work in batch.requests]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & {request.request_id for request in preempted}
        for work in batch.requests:
            request = scheduler.requests[work.request_id]
            assert request.slot == work.slot
            assert work.start + work.num_tokens < request.max_total_tokens, "KV that nobody will need"
        for victim in preempted:
            assert all(request.urgency < victim.urgency for request in scheduler.running), (
                "somebody less urgent was spared"
            )
        assert batch.requests or not scheduler.requests or self.in_flight or self.urgent, (
            "nothing runs though somebody waits"
        )

    @precondition(lambda self: hasattr(self, "rig"))
    @invariant()
    def consistent(self) -> None:
        scheduler, config = self.scheduler, self.rig.config
        kv = scheduler.kv
        kv.pool.check()
        kv.cpu_pool.check()
        requests = scheduler.requests.values()
        held = Counter(block for request in requests for block in request.block_ids)
        held_cpu = Counter(block for request in requests for block in request.cpu_block_ids)
        assert all(kv.pool.ref_count(block) == held[block] for block in range(config.num_blocks))
        assert all(kv.cpu_pool.ref_count(block) == held_cpu[block] for block in range(config.num_cpu_blocks))
        running = list(scheduler.running)
        assert len(running) <= config.max_num_seqs
        assert len({request.slot for request in running}) == len(running)
        assert running == sorted(running, key=lambda request: request.urgency)
        for request in running:
            assert request.status in (RequestStatus.RUNNING, RequestStatus.SWAPPING_IN)
            assert 0 <= request.slot < config.max_num_seqs
            assert 0 < request.num_computed_tokens <= request.capacity
            assert len(request.block_ids) * config.block_size == request.capacity
        waiting = list(scheduler.waiting)
        assert waiting == sorted(waiting, key=lambda request: request.urgency)
        assert {*running, *waiting} | {r for r in requests if r.fork_parent is not None} == set(requests)
        for request in requests:
            on_cpu = request.status is RequestStatus.SWAPPED
            assert on_cpu == bool(request.cpu_block_ids and not request.block_ids)
            assert on_cpu or request.status is RequestStatus.SWAPPING_IN or not request.cpu_block_ids
            if not request.block_ids and not request.cpu_block_ids:
                assert request.num_computed_tokens == 0
        stats = scheduler.stats()
        assert stats.num_running + stats.num_waiting + stats.num_swapped == len(requests)
        assert 0 <= stats.num_used_kv_tokens <= stats.num_allocated_kv_tokens

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(2000):
            if not self.scheduler.requests and not self.in_flight and not self.urgent:
                break
            self.one_step()
        self.rig.check_all_free()
        failed = {name for name, (reason, _) in self.rig.ends.items() if reason == "error"}
        assert failed <= set(self.rig.runner.forced_tokens)
        self.rig.check_outputs()


SchedulerMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_traces(first: int) -> None:
    """The same machine on evenly drawn, longer traces in tight pools: hypothesis prefers short and easy."""
    for seed in range(first, first + 25):
        run_trace(random.Random(seed), failures=seed % 2 * 2)


def test_random_traces_with_urgent_steps() -> None:
    """Urgent requests come all the time, and take the lane whenever they may."""
    num_urgent = 0
    for seed in range(1000, 1120):
        machine = run_trace(random.Random(seed), failures=seed % 3, urgent=40)
        num_urgent += machine.num_urgent
    assert num_urgent > 200


def run_trace(draw: random.Random, failures: float = 0.0, urgent: float = 0.0) -> SchedulerMachine:
    """`failures`, `urgent`: of about a hundred calls, how many are steps that fail, and urgent prompts."""
    machine = SchedulerMachine()
    limits = {
        "max_num_seqs": draw.choice([1, 2, 3, 5, 8]),
        "max_num_batched_tokens": draw.choice([1, 2, 4, 7, 16, 64]),
        "block_size": draw.choice([1, 2, 4]),
        "num_cpu_blocks": draw.choice([0, 1, 3, 8, 30]),
        "enable_prefix_caching": draw.random() < 0.7,
        "scheduling_policy": draw.choice(["fcfs", "priority"]),
        "preemption_mode": draw.choice(["auto", "swap", "recompute"]),
        "admission_policy": draw.choice(["forecast", "greedy", "greedy"]),
        "long_prefill_token_threshold": draw.choice([0, 0, 3]),
        "urgent_lane": draw.random() < 0.5,
    }
    if urgent:
        limits |= {"urgent_lane": True, "scheduling_policy": "priority", "max_num_batched_tokens": 64}
    spare, overlap, swap_in_steps = draw.choice([0, 0, 1, 3, 8]), draw.randint(0, 2), draw.randint(0, 3)
    machine.start(limits=limits, spare=spare, overlap=overlap, swap_in_steps=swap_in_steps)
    for _ in range(draw.randint(10, 120)):
        random_call(machine, draw, failures, urgent)
        machine.consistent()
    machine.teardown()
    return machine


def random_call(machine: SchedulerMachine, draw: random.Random, failures: float, urgent: float) -> None:
    which = draw.randint(0, 100)

    def urgent_prompt() -> None:
        prompt = [draw.randint(0, 1) for _ in range(draw.choice([1, 4, 8, 13]))]
        machine.add(
            prompt=prompt,
            max_tokens=draw.choice([1, 5, 9]),
            priority=-draw.randint(1, 50),
            salt="",
            eos=frozenset(),
        )
        machine.urgent_step(first=draw.random() < 0.7)
        if draw.random() < 0.2:
            machine.abort(len(machine.scheduler.requests) - 1, True)

    (call,) = draw.choices(
        [
            lambda: machine.add(
                prompt=[draw.randint(0, 1) for _ in range(draw.choice([1, 4, 8, 13]))],
                max_tokens=draw.choice([1, 5, 9, 10]),
                priority=draw.randint(0, 2),
                salt=draw.choice(["", "", "s"]),
                eos=draw.choice([frozenset(), frozenset(range(2))]),
                seed=draw.randint(0, 3),
            ),
            lambda: machine.step(draw.randint(1, 4)),
            lambda: machine.more_choices(which, draw.randint(1, 3), draw.randint(1, 9)),
            lambda: machine.beam(which, draw.randint(0, 49), draw.random() < 0.5),
            lambda: machine.abort(which, True),
            lambda: machine.costs_change(draw.choice([1.0, 1e15])),
            lambda: machine.fails_to_sample(which, True),
            lambda: machine.reset_prefix_cache(True),
            lambda: machine.abort_all(True),
            lambda: machine.step_fails(which % 2 == 0, True),
            lambda: machine.urgent_step(which % 3 > 0),
            machine.urgent_result,
            urgent_prompt,
        ],
        [25, 52, 8, 7, 4, 2, 1, 1, 0.2, failures, 15, 10, urgent],
    )
    call()
