"""Preemption by swap and by recomputation: who is taken, what it costs, that it goes on where it stopped."""

from __future__ import annotations

from typing import Any

import pytest

from pagedinfer.engine.preemption import PreemptionCosts
from pagedinfer.engine.request import Request, RequestStatus
from tests.engine.rig import SWAPPING, Rig, prompt_of


def two_in_a_small_pool(**config: Any) -> tuple[Rig, Request, Request]:
    """The pool has room for one of them at its longest; the younger one has to go."""
    defaults = {"num_blocks": 6, "max_model_len": 25, "num_cpu_blocks": 8, "preemption_mode": "swap"}
    rig = Rig(**(defaults | {"enable_prefix_caching": False} | config))
    old = rig.add("old", prompt_of(8), max_tokens=14)
    young = rig.add("young", prompt_of(8, first=20), max_tokens=14)
    return rig, old, young


def test_a_swapped_request_goes_on_exactly_where_it_stopped() -> None:
    rig, old, young = two_in_a_small_pool()
    rig.step_until(lambda: young.status is RequestStatus.SWAPPED)
    assert rig.batch.swaps_out
    assert all(work.request_id == "old" for work in rig.batch.requests)
    assert young.block_ids == []
    assert len(young.cpu_block_ids) == rig.scheduler.kv.blocks_for(young.num_computed_tokens)
    stopped_at = young.num_computed_tokens
    computed = rig.runner.num_computed

    rig.step_until(lambda: young.status is RequestStatus.RUNNING)
    (work,) = [work for work in rig.batch.requests if work.request_id == "young"]
    assert (work.start, work.num_tokens) == (stopped_at, 1)
    assert len(rig.batch.swaps_in) == rig.scheduler.kv.blocks_for(stopped_at)
    assert rig.runner.num_computed > computed
    rig.run()
    rig.check_outputs()
    # Nothing was computed twice: each prompt once, and every token but the last.
    assert rig.runner.num_computed == 2 * (8 + 14 - 1)
    assert rig.scheduler.counters.num_preemptions_swap == young.num_preemptions == 1
    assert old.num_preemptions == 0


def test_recomputation_computes_again() -> None:
    rig, _, young = two_in_a_small_pool(preemption_mode="recompute")
    rig.run()
    rig.check_outputs()
    assert young.num_preemptions == 1
    assert rig.runner.num_computed > 2 * (8 + 14 - 1)
    assert rig.scheduler.counters.num_preemptions_recompute == 1
    assert rig.scheduler.counters.num_blocks_swapped_out == 0


@pytest.mark.parametrize(
    ("swap_rate", "prefill_rate", "kind"),
    [(1e12, 1e3, "swap"), (1e6, 1e3, "recompute"), (1e12, 1e9, "recompute")],
)
def test_auto_takes_what_is_cheaper(swap_rate: float, prefill_rate: float, kind: str) -> None:
    rig, _, young = two_in_a_small_pool(preemption_mode="auto")
    rig.scheduler.costs.block_bytes = 1 << 20
    rig.scheduler.costs.swap_bytes_per_second = swap_rate
    rig.scheduler.costs.prefill_tokens_per_second = prefill_rate
    rig.run()
    rig.check_outputs()
    assert young.num_preemptions == 1
    assert (rig.scheduler.counters.num_preemptions_swap == 1) == (kind == "swap")


def test_costs_follow_what_is_measured() -> None:
    costs = PreemptionCosts(block_bytes=1 << 20, swap_bytes_per_second=1e9, prefill_tokens_per_second=1e3)
    for _ in range(60):
        costs.observe_swap(num_blocks=100, seconds=0.002)
        costs.observe_prefill(num_tokens=4000, seconds=0.1)
    costs.observe_swap(num_blocks=0, seconds=0.0)  # tells nothing
    assert costs.swap_bytes_per_second == pytest.approx(100 * (1 << 20) / 0.002, rel=1e-3)
    assert costs.prefill_tokens_per_second == pytest.approx(40_000, rel=1e-3)
    assert costs.transfer_seconds(100) == pytest.approx(0.002, rel=1e-3)
    assert costs.recompute_seconds(4000) == pytest.approx(0.1, rel=1e-3)
    assert costs.prefer_swap(100, 1000)
    assert not costs.prefer_swap(100, 100)


@pytest.mark.parametrize("num_cpu_blocks", [0, 2])
@pytest.mark.parametrize("n", [1, 8])
def test_too_little_cpu_room_falls_back_to_recomputation(num_cpu_blocks: int, n: int) -> None:
    """vllm#787, vllm#546: n > 1 and a small swap space aborted the engine."""
    rig, _, _ = two_in_a_small_pool(num_cpu_blocks=num_cpu_blocks, max_num_seqs=8)
    for i in range(1, n):
        rig.fork("young", f"young{i}", prompt_of(8, first=20), max_tokens=14, seed=i)
    rig.run()
    rig.check_outputs()
    assert all(len(output) == 14 for output in rig.outputs.values())
    assert rig.scheduler.counters.num_preemptions_recompute > 0
    assert num_cpu_blocks or rig.scheduler.counters.num_preemptions_swap == 0
    rig.add("later", prompt_of(5), max_tokens=3)
    rig.run()
    assert len(rig.outputs["later"]) == 3


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("n", [1, 4])
def test_preempted_or_not_the_tokens_are_the_same(mode: str, caching: bool, n: int) -> None:
    """vllm#16832, vllm PR#5349, vllm PR#19940: greedy and seeded outputs changed with preemption."""
    outputs = []
    for num_blocks in (9, 200):
        rig = Rig(
            num_blocks=num_blocks,
            num_cpu_blocks=30,
            preemption_mode=mode,
            enable_prefix_caching=caching,
            max_num_seqs=16,
        )
        for i in range(4):
            rig.add(f"r{i}", prompt_of(4 + 3 * i), max_tokens=20, seed=i)
            for choice in range(1, n):
                rig.fork(f"r{i}", f"r{i}-{choice}", prompt_of(4 + 3 * i), max_tokens=20, seed=50 + choice)
        rig.run()
        rig.check_outputs()
        outputs.append(rig.outputs)
        assert (rig.num_preemptions > 0) == (num_blocks == 9)
        if num_blocks == 9 and mode != "recompute":
            assert rig.scheduler.counters.num_preemptions_swap > 0
    assert outputs[0] == outputs[1]


def test_a_swapped_request_shares_what_the_prefix_cache_still_has() -> None:
    rig, _, young = two_in_a_small_pool(enable_prefix_caching=True)
    rig.step_until(lambda: young.status is RequestStatus.SWAPPED)
    rig.scheduler.abort_request("old")
    rig.step()
    assert young.status is RequestStatus.RUNNING
    # Of its three blocks two are still on the device; the other one was handed to "old".
    assert len(young.block_ids) == 4
    assert len(rig.batch.swaps_in) == 1
    rig.run()
    rig.check_outputs()


def test_abort_of_a_swapped_request_frees_its_cpu_blocks() -> None:
    rig, _, young = two_in_a_small_pool()
    rig.step_until(lambda: young.status is RequestStatus.SWAPPED)
    assert rig.scheduler.stats().num_swapped == 1
    assert rig.scheduler.stats().cpu_cache_usage > 0
    assert rig.scheduler.abort_request("young")
    assert rig.scheduler.stats().num_used_cpu_blocks == 0
    rig.run()
    rig.check_outputs()


def test_the_last_running_one_waits_for_a_block_rather_than_losing_what_it_has() -> None:
    rig = Rig(num_blocks=6, max_model_len=25, enable_prefix_caching=False)
    rig.add("old", prompt_of(15), max_tokens=2)
    young = rig.add("young", prompt_of(8, first=20), max_tokens=10)
    rig.step_until(lambda: "old" in rig.ends)
    rig.run()
    assert young.num_preemptions == 0
    assert rig.scheduler.counters.num_stalls > 0
    rig.check_outputs()


def test_equals_do_not_take_turns_in_evicting_each_other() -> None:
    rig = Rig(num_blocks=8, max_num_seqs=8, max_model_len=32, num_cpu_blocks=20, preemption_mode="swap")
    requests = [rig.add(f"r{i}", prompt_of(8, first=i), max_tokens=20) for i in range(6)]
    for oldest in requests:
        while not oldest.finished:
            rig.step()
            runs = oldest.request_id in {work.request_id for work in rig.batch.requests}
            assert runs or oldest.swap_in_step == rig.batch.step
    rig.check_outputs()
    rig.check_all_free()
    assert list(rig.ends) == [f"r{i}" for i in range(6)]
    assert rig.num_preemptions > 0


def swapping_in(swap_in_steps: int) -> tuple[Rig, Request]:
    """A rig in which a request is on its way back to the device, which takes many steps, and others run."""
    rig = Rig(swap_in_steps, **SWAPPING)
    victim = rig.displace_victim()
    rig.step_until(lambda: victim.status is RequestStatus.SWAPPING_IN)
    return rig, victim


def test_others_run_while_a_swapped_request_comes_back() -> None:
    rig, victim = swapping_in(swap_in_steps=3)
    began = rig.batch.step
    assert rig.batch.swaps_in
    assert not rig.batch.admitted
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_swapped) == (2, 0)
    while victim.status is RequestStatus.SWAPPING_IN:
        assert [work.request_id for work in rig.batch.requests] == ["long"]
        rig.step()
    assert rig.batch.step == began + 4
    assert [admitted.request_id for admitted in rig.batch.admitted] == ["victim"]
    assert rig.runner.num_waits == 0
    rig.run()
    rig.check_outputs()


def test_a_swapped_request_does_not_wait_if_nobody_else_can_run() -> None:
    rig, _ = swapping_in(swap_in_steps=1000)
    rig.run()
    rig.check_outputs()
    assert rig.runner.num_waits == 1


def test_a_few_blocks_are_waited_for() -> None:
    """Rather than the request for the next step."""
    rig, victim = swapping_in(swap_in_steps=1000)
    rig.scheduler.costs.swap_bytes_per_second = 25e9
    rig.add("urgent 2", prompt_of(4, first=30), max_tokens=2, priority=0)
    rig.step_until(lambda: victim.status is RequestStatus.SWAPPED)
    rig.step_until(lambda: victim.status is RequestStatus.RUNNING)
    assert rig.batch.swaps_in
    assert [admitted.request_id for admitted in rig.batch.admitted] == ["victim"]
    rig.run()
    rig.check_outputs()


def test_abort_of_a_request_on_its_way_back_frees_everything() -> None:
    rig, victim = swapping_in(swap_in_steps=1000)
    assert rig.scheduler.abort_request("victim")
    assert victim.block_ids == victim.cpu_block_ids == []
    assert rig.scheduler.kv.cpu_pool.num_free == 8
    rig.run()
    rig.check_outputs()


def test_a_request_that_loses_its_blocks_on_its_way_back_is_swapped_still() -> None:
    rig, victim = swapping_in(swap_in_steps=1000)
    on_cpu = victim.cpu_block_ids
    num_moved = rig.scheduler.counters.num_blocks_swapped_out
    rig.add("urgent 2", prompt_of(4, first=30), max_tokens=2, priority=0)
    rig.step()
    assert victim.status is RequestStatus.SWAPPED
    assert victim.cpu_block_ids == on_cpu
    assert rig.scheduler.counters.num_blocks_swapped_out == num_moved
    rig.run()
    rig.check_outputs()
    assert victim.num_preemptions == 2


def test_a_prefix_from_the_cpu_holds_up_nobody() -> None:
    rig = Rig(2, num_blocks=9, num_cpu_blocks=20, max_model_len=32)
    rig.scheduler.costs.swap_bytes_per_second = 1.0
    rig.scheduler.costs.prefill_tokens_per_second = 1e-9
    rig.add("first", prompt_of(16), max_tokens=1)
    rig.run()
    rig.add("evicts", prompt_of(26, first=25), max_tokens=6)
    rig.run()
    rig.add("other", prompt_of(4, first=40), max_tokens=12)
    rig.step()
    again = rig.add("again", prompt_of(16), max_tokens=2)
    rig.step()
    assert again.status is RequestStatus.SWAPPING_IN
    assert again.num_cached_tokens == 12
    assert rig.batch.requests
    rig.run()
    rig.check_outputs()
    assert rig.runner.num_waits == 0
