"""scheduling_policy="priority": who goes first, who has to give way, and that equals do not."""

from __future__ import annotations

from typing import Any

import pytest

from pagedinfer.engine.request import RequestStatus
from tests.engine.rig import Rig, prompt_of


def priority_rig(**config: Any) -> Rig:
    return Rig(**({"scheduling_policy": "priority", "max_num_seqs": 2, "num_cpu_blocks": 32} | config))


def test_the_lowest_number_goes_first_then_the_first_to_come() -> None:
    rig = priority_rig(max_num_seqs=1)
    for name, priority in [("c", 5), ("a", 1), ("b", 1), ("d", 9)]:
        rig.add(name, prompt_of(4), max_tokens=2, priority=priority)
    rig.run()
    assert list(rig.ends) == ["a", "b", "c", "d"]


def test_under_fcfs_priorities_are_not_looked_at() -> None:
    rig = Rig(max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 1)]:
        rig.add(name, prompt_of(4), max_tokens=2, priority=priority)
    rig.run()
    assert list(rig.ends) == ["a", "b"]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_urgent_request_takes_the_slot_of_the_least_urgent(mode: str) -> None:
    rig = priority_rig(preemption_mode=mode)
    rig.add("a", prompt_of(6), max_tokens=20, priority=1)
    rig.add("b", prompt_of(6, first=20), max_tokens=20, priority=2)
    rig.step()
    rig.add("urgent", prompt_of(6, first=30), max_tokens=3, priority=0)
    rig.step()
    assert [work.request_id for work in rig.batch.requests] == ["urgent"]
    assert rig.requests["b"].status in (RequestStatus.SWAPPED, RequestStatus.WAITING)
    assert rig.scheduler.counters.num_displaced == 1
    rig.step()
    assert [work.request_id for work in rig.batch.requests] == ["urgent", "a"]
    rig.run()
    rig.check_outputs()
    assert next(iter(rig.ends)) == "urgent"
    assert rig.requests["a"].num_preemptions == 0


@pytest.mark.parametrize(("caching", "num_blocks"), [(True, 64), (True, 10), (False, 64)])
def test_whoever_loses_its_slot_alone_finds_its_blocks_again(caching: bool, num_blocks: int) -> None:
    """It is not swapped out, if the prefix cache keeps what it drops."""
    rig = priority_rig(
        num_blocks=num_blocks, num_cpu_blocks=16, max_model_len=40, enable_prefix_caching=caching
    )
    rig.scheduler.costs.prefill_tokens_per_second = 1.0  # to swap is far cheaper than to compute
    rig.add("a", prompt_of(6), max_tokens=9, priority=1)
    rig.add("b", prompt_of(17, first=20), max_tokens=9, priority=2)
    for _ in range(3):
        rig.step()
    rig.add("urgent", prompt_of(6, first=30), max_tokens=1, priority=0)
    rig.step()
    [preempted] = rig.scheduler.preempted
    assert (preempted.request_id, preempted.lack) == ("b", "slots")
    finds = caching and num_blocks == 64
    assert preempted.kind == ("recompute" if finds else "swap")
    computed = rig.runner.num_computed
    rig.step_until(lambda: rig.requests["b"].status is RequestStatus.RUNNING)
    assert rig.runner.num_computed - computed <= 2 + 4
    rig.run()
    rig.check_outputs()


def test_an_equally_urgent_request_waits() -> None:
    rig = priority_rig()
    for name in ("a", "b", "c"):
        rig.add(name, prompt_of(6), max_tokens=9, priority=1)
    rig.step()
    rig.step()
    assert {work.request_id for work in rig.batch.requests} == {"a", "b"}
    assert rig.scheduler.stats().waiting_reason == "slots"
    rig.run()
    assert rig.num_preemptions == 0


def test_an_urgent_request_takes_blocks() -> None:
    rig = priority_rig(num_blocks=8, max_model_len=32, enable_prefix_caching=False, max_num_seqs=8)
    for i in range(3):
        rig.add(f"r{i}", prompt_of(8, first=i), max_tokens=5, priority=3)
    rig.step()
    rig.add("urgent", prompt_of(16, first=9), max_tokens=2, priority=1)
    rig.step()
    rig.step()
    assert [work.request_id for work in rig.batch.requests] == ["urgent", "r0"]
    rig.run()
    rig.check_outputs()
    assert rig.requests["r0"].num_preemptions == 0
    assert rig.requests["r2"].num_preemptions == 1


def test_nobody_is_displaced_for_a_request_that_still_would_not_fit() -> None:
    rig = priority_rig(num_blocks=8, max_model_len=32, enable_prefix_caching=False, max_num_seqs=8)
    rig.add("first", prompt_of(16), max_tokens=5, priority=1)
    rig.add("lesser", prompt_of(8, first=5), max_tokens=5, priority=3)
    rig.step()
    rig.add("big", prompt_of(20, first=9), max_tokens=2, priority=2)
    rig.step()
    assert {work.request_id for work in rig.batch.requests} == {"first", "lesser"}
    rig.run()
    rig.check_outputs()


def test_an_urgent_prompt_goes_before_a_long_one_and_leaves_decodes_their_token() -> None:
    rig = priority_rig(max_num_seqs=8, max_num_batched_tokens=8, num_blocks=128)
    rig.add("decode", [1], max_tokens=50, priority=2)
    rig.step()
    rig.add("long", prompt_of(60), max_tokens=2, priority=2)
    rig.step()
    rig.add("urgent", prompt_of(12, first=7), max_tokens=4, priority=0)
    rig.step()
    assert [(work.request_id, work.num_tokens) for work in rig.batch.requests] == [
        ("urgent", 7),
        ("decode", 1),
    ]
    rig.step()
    assert [(work.request_id, work.num_tokens) for work in rig.batch.requests] == [
        ("urgent", 5),
        ("decode", 1),
        ("long", 2),
    ]
    rig.run()
    rig.check_outputs()


def test_a_displaced_request_resumes_before_new_ones_of_its_priority() -> None:
    rig = priority_rig(preemption_mode="swap")
    rig.add("a", prompt_of(6), max_tokens=20, priority=1)
    rig.add("b", prompt_of(6, first=20), max_tokens=20, priority=1)
    rig.step()
    rig.add("urgent", prompt_of(4), max_tokens=2, priority=0)
    rig.add("new", prompt_of(4), max_tokens=2, priority=1)
    rig.run()
    rig.check_outputs()
    assert list(rig.ends) == ["urgent", "a", "b", "new"]
    assert rig.requests["b"].num_preemptions == 1


def test_two_urgent_ones_displace_two() -> None:
    rig = priority_rig()
    rig.add("a", prompt_of(6), max_tokens=9, priority=5)
    rig.add("b", prompt_of(6, first=20), max_tokens=9, priority=4)
    rig.step()
    rig.add("x", prompt_of(5, first=30), max_tokens=3, priority=1)
    rig.add("y", prompt_of(5, first=40), max_tokens=3, priority=2)
    rig.step()
    assert [work.request_id for work in rig.batch.requests] == ["x", "y"]
    rig.run()
    rig.check_outputs()
    assert list(rig.ends) == ["x", "y", "b", "a"]


@pytest.mark.parametrize("chunked", [True, False])
def test_less_urgent_prompts_take_little_of_a_step_beside_an_urgent_one(chunked: bool) -> None:
    """Its first token comes at the end of the step, and every token of a prompt makes the step longer."""
    rig = priority_rig(
        max_num_seqs=4,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        num_blocks=4096,
        enable_chunked_prefill=chunked,
    )
    rig.add("decoding", prompt_of(4), max_tokens=40, priority=2)
    rig.step()
    rig.add("urgent", prompt_of(100, first=5), max_tokens=2, priority=0)
    rig.add("long", prompt_of(3000, first=9), max_tokens=2, priority=1)
    rig.step()
    beside = {"long": 256, "decoding": 1} if chunked else {}
    assert {work.request_id: work.num_tokens for work in rig.batch.requests} == {"urgent": 100, **beside}
    rig.step()
    assert {work.request_id: work.num_tokens for work in rig.batch.requests} == {
        "urgent": 1,
        "decoding": 1,
        "long": 2744 if chunked else 3000,
    }
    rig.run()
    rig.check_outputs()


def test_a_short_urgent_prompt_has_every_other_step_to_itself() -> None:
    rig = priority_rig(max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, num_blocks=1024)
    rig.add("equal", prompt_of(4), max_tokens=40, priority=0)
    rig.add("decoding", prompt_of(4, first=9), max_tokens=40, priority=2)
    rig.step()
    schedule = []
    for i in range(4):
        rig.add(f"urgent {i}", prompt_of(100, first=20 + i), max_tokens=1, priority=1)
        rig.add(f"patient {i}", prompt_of(8, first=30 + i), max_tokens=1, priority=3)
        rig.step()
        schedule.append([work.request_id for work in rig.batch.requests])
    assert schedule == [
        ["equal", "urgent 0"],
        ["equal", "urgent 1", "decoding", "patient 0", "patient 1"],
        ["equal", "urgent 2"],
        ["equal", "urgent 3", "decoding", "patient 2", "patient 3"],
    ]
    rig.step()
    rig.add("long", prompt_of(300, first=40), max_tokens=1, priority=1)
    rig.step()
    assert [work.request_id for work in rig.batch.requests] == ["equal", "long", "decoding"]
    rig.run()
    rig.check_outputs()


def test_whoever_gives_way_is_not_admitted_in_the_same_step() -> None:
    """Not even when all who were to have their turn before a newcomer had to give way, or stopped short."""
    rig = priority_rig(
        max_num_seqs=8,
        num_blocks=23,
        block_size=1,
        max_num_batched_tokens=20,
        enable_prefix_caching=False,
        long_prefill_token_threshold=5,
        preemption_mode="recompute",
    )
    rig.add("first", prompt_of(8), max_tokens=8, priority=0)
    for _ in range(5):
        rig.step()
    rig.add("third", prompt_of(1, first=20), max_tokens=12, priority=2)
    rig.add("last", prompt_of(1, first=30), max_tokens=12, priority=5)
    rig.step()
    rig.add("second", prompt_of(10, first=5), max_tokens=2, priority=1)
    rig.step()
    rig.add("newcomer", prompt_of(5, first=11), max_tokens=2, priority=3)
    rig.step()
    assert {each.request_id for each in rig.scheduler.preempted} == {"third", "last"}
    assert [work.request_id for work in rig.batch.requests] == ["first"]
    rig.run()
    rig.check_outputs()
