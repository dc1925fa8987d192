"""Choices of one prompt and beams: shared blocks, copy on write, prompts computed once."""

from __future__ import annotations

import pytest

from pagedinfer.engine.request import RequestStatus
from tests.engine.rig import Rig, make_request, prompt_of


def add_choices(rig: Rig, n: int, prompt: list[int], **fields: object) -> None:
    rig.add("c0", prompt, **fields)
    for i in range(1, n):
        rig.fork("c0", f"c{i}", prompt, seed=i, **fields)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 19, 32])
def test_choices_share_the_prompt_and_copy_its_last_block(length: int, caching: bool) -> None:
    """vllm#1101: forked children were no copies of their parent."""
    rig = Rig(block_size=16, num_blocks=40, max_num_batched_tokens=64, enable_prefix_caching=caching)
    add_choices(rig, 4, prompt_of(length), max_tokens=20)
    rig.step()
    assert [work.num_tokens for work in rig.batch.requests] == [length]
    rig.step()
    # Each of the others computes the prompt's last token alone: its logits are what it samples from.
    assert [(work.start, work.num_tokens) for work in rig.batch.requests[1:]] == [(length - 1, 1)] * 3
    assert len(rig.batch.copies) == (3 if (length - 1) % 16 else 0)
    tables = [rig.requests[f"c{i}"].block_ids for i in range(4)]
    shared = (length - 1) // 16
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    assert len({table[shared] for table in tables}) == 4
    rig.run()
    rig.check_outputs()
    assert len({tuple(output) for output in rig.outputs.values()}) == 4
    # The prompt once, its last token for each choice, and each generated token but the last.
    assert rig.runner.num_computed == length + 3 + 4 * 19


def test_more_choices_than_slots_wait_their_turn() -> None:
    """vllm#6646: n above max_num_seqs never finished."""
    rig = Rig(block_size=16, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=64)
    add_choices(rig, 9, prompt_of(19), max_tokens=7)
    rig.run()
    rig.check_outputs()
    assert [len(output) for output in rig.outputs.values()] == [7] * 9
    assert rig.runner.num_computed == 19 + 8 + 9 * 6  # the last five share it though the first are gone


def test_choices_of_a_long_prompt_wait_for_all_of_its_chunks() -> None:
    rig = Rig(max_num_batched_tokens=5)
    add_choices(rig, 3, prompt_of(22), max_tokens=4)
    assert rig.scheduler.stats().num_waiting == 3
    for _ in range(5):
        rig.step()
        assert {work.request_id for work in rig.batch.requests} == {"c0"}
    rig.run()
    rig.check_outputs()
    assert rig.runner.num_computed == 22 + 2 + 3 * 3


def test_a_parent_that_ends_at_once_leaves_its_blocks_to_its_children() -> None:
    rig = Rig(enable_prefix_caching=False)
    add_choices(rig, 3, prompt_of(10), max_tokens=1)
    rig.run()
    rig.check_outputs()
    assert rig.runner.num_computed == 10 + 2
    # The last to come is the only one left to use the parent's last block, and takes it as it is.
    assert rig.scheduler.counters.num_blocks_copied == 1


@pytest.mark.parametrize("when", ["before", "chunked", "after"])
def test_children_go_on_when_their_parent_is_aborted(when: str) -> None:
    rig = Rig(max_num_batched_tokens=6)
    add_choices(rig, 3, prompt_of(10), max_tokens=5)
    for _ in range({"before": 0, "chunked": 1, "after": 2}[when]):
        rig.step()
    rig.scheduler.abort_request("c0")
    rig.run()
    rig.check_outputs()
    assert [len(rig.outputs[f"c{i}"]) for i in (1, 2)] == [5, 5]
    assert rig.runner.num_computed <= 10 + 1 + 3 * 5


def test_abort_of_a_child_in_any_state() -> None:
    for steps in range(6):
        rig = Rig(max_num_batched_tokens=6, max_num_seqs=2)
        add_choices(rig, 4, prompt_of(10), max_tokens=5)
        for _ in range(steps):
            rig.step()
        for i in (1, 3):
            rig.scheduler.abort_request(f"c{i}")
        rig.run()
        rig.check_outputs()
        assert len(rig.outputs["c2"]) == 5


def test_forks_give_up_what_they_share_when_blocks_run_out() -> None:
    """The parent's blocks are all there are: its children must not keep it from going on, nor be stuck."""
    rig = Rig(num_blocks=5, max_model_len=21, max_num_seqs=1)
    add_choices(rig, 3, prompt_of(8), max_tokens=12)
    rig.add("other", prompt_of(12, first=20), max_tokens=8)
    rig.run()
    rig.check_outputs()
    assert [len(output) for output in rig.outputs.values()] == [12, 12, 12, 8]
    assert rig.num_preemptions == 0


def test_a_pool_too_small_for_the_copy_of_a_block() -> None:
    rig = Rig(num_blocks=2, block_size=4, max_model_len=9, max_num_seqs=2)
    add_choices(rig, 3, prompt_of(8), max_tokens=1)
    rig.run()
    rig.check_outputs()
    assert [len(output) for output in rig.outputs.values()] == [1, 1, 1]


def test_beams_fork_from_running_sequences() -> None:
    rig = Rig(block_size=4, num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64)
    prompt = prompt_of(6)
    rig.add("b0-0", prompt, max_tokens=20)
    rig.step()
    beams = ["b0-0"]
    for depth in range(1, 12):
        before = rig.runner.num_computed
        children = []
        for index in range(3):
            parent = rig.requests[beams[index % len(beams)]]
            output = [*parent.output_token_ids[:-1], (7 * depth + index) % 48]
            name = f"b{depth}-{index}"
            rig.fork(parent.request_id, name, prompt, output_token_ids=output, max_tokens=20)
            children.append(name)
        for name in beams:
            rig.scheduler.abort_request(name)
        rig.step()
        assert rig.runner.num_computed - before == 3  # one token for each beam: nothing is computed twice
        beams = children
    rig.run()
    rig.check_outputs()
    assert {len(rig.requests[name].output_token_ids) for name in beams} == {20}


def test_a_fork_has_its_parents_urgency() -> None:
    rig = Rig(num_blocks=7, block_size=4, max_model_len=24, max_num_seqs=4, enable_prefix_caching=False)
    rig.add("old", prompt_of(8), max_tokens=12)
    young = rig.add("young", prompt_of(8, first=20), max_tokens=12)
    rig.step()
    child = rig.fork("old", "child", prompt_of(8), max_tokens=12)
    rig.step_until(lambda: rig.num_preemptions)
    assert young.num_preemptions == 1
    assert child.num_preemptions == 0
    assert child.status is RequestStatus.RUNNING
    rig.run()
    rig.check_outputs()


def test_forks_that_are_none_are_refused() -> None:
    rig = Rig()
    rig.add("a", prompt_of(6), cache_salt="s")
    scheduler = rig.scheduler
    with pytest.raises(ValueError, match="no unfinished request 'b' to fork from"):
        scheduler.fork("b", make_request("c", prompt_of(6)))
    for other in (prompt_of(6, first=1), prompt_of(9)):
        with pytest.raises(ValueError, match="must be the first of its parent's"):
            scheduler.fork("a", make_request("c", other, cache_salt="s"))
    with pytest.raises(ValueError, match="cache_salt differs"):
        scheduler.fork("a", make_request("c", prompt_of(6)))
    with pytest.raises(ValueError, match="unfinished request 'a' already"):
        scheduler.fork("a", make_request("a", prompt_of(6), cache_salt="s"))
    with pytest.raises(ValueError, match="nothing to generate"):
        scheduler.fork(
            "a", make_request("c", prompt_of(5), output_token_ids=[5], cache_salt="s", max_tokens=1)
        )
    rig.run()
