"""Steps that run beside those under way: for whom they are, and which blocks they may use."""

from __future__ import annotations

from typing import Any

import pytest

from pagedinfer.engine.batch import Batch
from pagedinfer.engine.request import Request, RequestStatus
from tests.engine.rig import Rig, prompt_of

OPTIONS: dict[str, Any] = {
    "scheduling_policy": "priority",
    "urgent_lane": True,
    "max_num_batched_tokens": 512,
}


def make_rig(**changes: Any) -> Rig:
    return Rig(**(OPTIONS | changes))


def saturate(rig: Rig, num_requests: int = 4, **fields: Any) -> list[Request]:
    """Requests that decode."""
    fields = {"max_tokens": 30, "priority": 1} | fields
    batch = [rig.add(f"b{i}", prompt_of(9, first=7 * i), **fields) for i in range(num_requests)]
    rig.step()
    rig.step()
    return batch


def launch(rig: Rig) -> Batch:
    """A step that the runner has not executed yet."""
    batch = rig.scheduler.schedule()
    assert batch.requests
    return batch


def finish(rig: Rig, batch: Batch) -> None:
    rig.update(batch, rig.runner.execute(batch).result())


def finish_urgent(rig: Rig, batch: Batch) -> None:
    rig.update(batch, rig.runner.execute_urgent(batch).result())


def urgent_batch(rig: Rig) -> Batch:
    batch = rig.scheduler.schedule_urgent()
    assert batch is not None
    return batch


def test_its_result_may_come_before_that_of_an_earlier_step() -> None:
    rig = make_rig()
    saturate(rig)
    under_way = launch(rig)
    request = rig.add("u", prompt_of(10, first=30), max_tokens=5)
    finish_urgent(rig, urgent_batch(rig))
    assert len(rig.outputs["u"]) == 1
    assert request.status is RequestStatus.WAITING
    finish(rig, under_way)
    rig.step()
    # Its second token takes a slot; nothing is computed again.
    assert [(work.start, work.num_tokens) for work in rig.batch.requests if work.request_id == "u"] == [
        (10, 1)
    ]
    assert rig.scheduler.counters.num_preemptions == 1
    rig.run()
    rig.check_outputs()
    assert len(rig.outputs["u"]) == 5
    assert rig.scheduler.counters.num_prompt_tokens == 4 * 9 + 10  # each counted once


def test_its_result_may_come_after_that_of_a_later_step() -> None:
    rig = make_rig()
    saturate(rig)
    under_way = launch(rig)
    rig.add("u", prompt_of(10, first=30), max_tokens=5)
    urgent = urgent_batch(rig)
    output = rig.runner.execute_urgent(urgent).result()
    later = launch(rig)
    assert "u" not in {work.request_id for work in later.requests}  # its token is not known
    finish(rig, under_way)
    finish(rig, later)
    rig.update(urgent, output)
    rig.run()
    rig.check_outputs()


def test_the_last_token_may_come_at_once() -> None:
    rig = make_rig()
    saturate(rig)
    rig.add("u", prompt_of(10, first=30), max_tokens=1)
    finish_urgent(rig, urgent_batch(rig))
    assert rig.ends["u"] == ("length", None)
    rig.run()
    assert rig.scheduler.counters.num_preemptions == 0


def test_blocks_that_a_step_under_way_still_writes_are_not_used() -> None:
    """A request that ends is in the step after already."""
    rig = make_rig(enable_prefix_caching=False)
    [ending, *_] = saturate(rig)
    held = set(ending.block_ids)
    under_way = launch(rig)
    rig.scheduler.abort_request(ending.request_id)
    request = rig.add("u", prompt_of(10, first=30), max_tokens=5)
    urgent = urgent_batch(rig)
    assert rig.scheduler.kv.pool.allocate(1)[0] in held  # it would have been the next
    assert not held.intersection(request.block_ids)
    finish_urgent(rig, urgent)
    finish(rig, under_way)


def test_blocks_of_one_that_gave_way_to_a_step_under_way_are_not_used() -> None:
    rig = make_rig(num_blocks=22, enable_prefix_caching=False, preemption_mode="recompute")
    batch = saturate(rig, max_tokens=20)
    under_way = launch(rig)
    while not rig.scheduler.preempted:  # they grow until the last one has to make room
        held = set(batch[-1].block_ids)
        finish(rig, under_way)
        under_way = launch(rig)
    assert batch[-1].status is RequestStatus.WAITING
    request = rig.add("u", prompt_of(3, first=30), max_tokens=5, priority=0)
    assert rig.scheduler.kv.num_free >= 1
    urgent = rig.scheduler.schedule_urgent()
    assert held.isdisjoint(request.block_ids)
    assert urgent is None  # no others were free
    finish(rig, under_way)
    rig.run()
    rig.check_outputs()


def test_what_a_step_under_way_is_computing_is_not_read() -> None:
    rig = make_rig()
    saturate(rig, num_requests=2)
    shared = prompt_of(12, first=40)
    rig.add("other", [*shared, 1], max_tokens=5, priority=1)
    under_way = launch(rig)  # which fills the blocks that the prefix cache knows already
    rig.add("u", [*shared, 2, 3], max_tokens=5)
    assert len(rig.scheduler.kv.find_prefix(rig.requests["u"]).blocks) == 3
    assert rig.scheduler.schedule_urgent() is None
    finish(rig, under_way)
    later = launch(rig)
    assert "u" in {work.request_id for work in later.requests}
    finish(rig, later)
    finish(rig, launch(rig))
    rig.add("v", [*shared, 2, 4], max_tokens=1, priority=-1)
    finish_urgent(rig, urgent_batch(rig))
    assert rig.requests["v"].num_cached_tokens == 12
    rig.run()
    rig.check_outputs()


def test_an_abort_on_its_way_frees_its_blocks() -> None:
    rig = make_rig()
    saturate(rig)
    free = rig.scheduler.kv.num_free
    under_way = launch(rig)
    rig.add("u", prompt_of(10, first=30), max_tokens=5)
    urgent = urgent_batch(rig)
    rig.scheduler.abort_request("u")
    assert rig.scheduler.kv.num_free == free
    finish_urgent(rig, urgent)
    finish(rig, under_way)
    assert rig.outputs["u"] == []
    rig.run()
    rig.check_outputs()


@pytest.mark.parametrize("start_afresh", ["abort_all", "recover"])
def test_after_a_fresh_start_a_step_has_to_end_first(start_afresh: str) -> None:
    """What was launched before and is forgotten may still write any block."""
    rig = make_rig()
    saturate(rig)
    launch(rig)
    if start_afresh == "abort_all":
        rig.scheduler.abort_all()
        rig.runner.slots = [None] * rig.config.max_num_seqs
        for i in range(4):
            rig.add(f"c{i}", prompt_of(5, first=i), max_tokens=30, priority=1)
    else:
        rig.scheduler.recover(["b0"])
    first = launch(rig)
    rig.add("u", prompt_of(10, first=30), max_tokens=5)
    assert rig.scheduler.schedule_urgent() is None
    finish(rig, first)
    rig.add("v", prompt_of(10, first=30), max_tokens=5, priority=-1)
    assert rig.scheduler.schedule_urgent() is not None


def test_it_is_for_short_prompts_that_are_more_urgent_than_somebody() -> None:
    rig = make_rig(num_blocks=200, max_model_len=400, max_num_seqs=8)
    assert rig.scheduler.schedule_urgent() is None  # nobody waits
    saturate(rig, num_requests=3)
    for name, length, priority in (("long", 257, 0), ("equal", 5, 1), ("less urgent", 5, 2)):
        rig.add(name, prompt_of(length, first=3), priority=priority)
        assert rig.scheduler.schedule_urgent() is None
        rig.scheduler.abort_request(name)
    rig.add("u", prompt_of(256, first=3), priority=0)
    assert rig.scheduler.schedule_urgent() is not None
    rig.add("v", prompt_of(5, first=30), priority=-1)
    assert rig.scheduler.schedule_urgent() is None  # one at a time


def test_the_less_urgent_keep_half_of_their_pace() -> None:
    rig = make_rig()
    saturate(rig)
    rig.add("u", prompt_of(10, first=30), max_tokens=1)
    finish_urgent(rig, urgent_batch(rig))
    rig.add("v", prompt_of(10, first=20), max_tokens=1)
    assert rig.scheduler.schedule_urgent() is None
    rig.step()
    assert {work.request_id for work in rig.batch.requests} >= {
        "b0",
        "b1",
        "b2",
    }  # nor does it have one alone
