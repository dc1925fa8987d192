"""The prefix cache through the scheduler: hits, evictions, salts, resets, the second tier."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.rig import Rig, prompt_of


def run_one(rig: Rig, name: str, prompt: list[int], **fields: Any) -> int:
    """Runs a request alone and checks its tokens; returns how many of its prompt were cached."""
    request = rig.add(name, prompt, **({"max_tokens": 3} | fields))
    rig.run()
    rig.check_outputs()
    return request.num_cached_tokens


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_fully_cached_prompt_still_computes_a_token(block_size: int, length: int) -> None:
    """nano-vllm#144, nano-vllm PR#199: a prompt of whole blocks that is cached left nothing to compute."""
    rig = Rig(block_size=block_size, num_blocks=512 // block_size, max_num_batched_tokens=64)
    assert run_one(rig, "first", prompt_of(length)) == 0
    again = run_one(rig, "second", prompt_of(length))
    assert again == (length - 1) // block_size * block_size
    assert rig.outputs["first"] == rig.outputs["second"]


def test_a_reused_block_is_not_found_under_its_old_content() -> None:
    """nano-vllm#163, vllm PR#4761: A, B which evicts A, A again, and A's beginning with C."""
    rig = Rig(block_size=4, num_blocks=8)
    a, b = prompt_of(20), prompt_of(24, first=20)
    for name, prompt in [("a1", a), ("b1", b), ("a2", a), ("mix", a[:9] + b[:7]), ("b2", b), ("a3", a)]:
        run_one(rig, name, prompt)
    assert rig.outputs["a1"] == rig.outputs["a2"] == rig.outputs["a3"]
    assert rig.scheduler.counters.prefix_cache_hits > 0


def test_the_same_prompt_three_times_in_one_step() -> None:
    """mini-sglang PR#142, vllm PR#7018: pages still in use were freed; hits and misses mixed in a batch."""
    rig = Rig(max_num_seqs=8, num_blocks=40, block_size=4, max_num_batched_tokens=64)
    for name in ("a", "b", "c"):
        rig.add(name, prompt_of(14), max_tokens=20)
    rig.add("other", prompt_of(9, first=30), max_tokens=20)
    rig.step()
    # The first computes the blocks, the others share them in the same step and compute the rest.
    assert [work.num_tokens for work in rig.batch.requests] == [14, 2, 2, 9]
    tables = [rig.requests[name].block_ids for name in ("a", "b", "c")]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({table[3] for table in tables}) == 3
    for churn in range(20):
        rig.add(f"x{churn}", prompt_of(3 + churn % 5, first=churn), max_tokens=2)
        rig.step()
    rig.run()
    rig.check_outputs()
    assert rig.outputs["a"] == rig.outputs["b"] == rig.outputs["c"]


def test_many_requests_compute_a_shared_prefix_once() -> None:
    rig = Rig(max_num_seqs=64, num_blocks=2000, max_num_batched_tokens=256, max_model_len=512)
    for i in range(64):
        rig.add(f"r{i}", [*prompt_of(256), i % 48, i // 48, *prompt_of(14, first=i)], max_tokens=1)
    rig.run()
    assert rig.runner.num_computed == 256 + 64 * 16
    rig.check_outputs()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    rig = Rig(block_size=4)
    assert run_one(rig, "turn1", prompt_of(10), max_tokens=9) == 0
    turn2 = prompt_of(10) + rig.outputs["turn1"] + [5, 6, 7]
    assert run_one(rig, "turn2", turn2) == 16  # 18 of the first turn were computed: four blocks


def test_salts_and_the_switch_keep_prompts_apart() -> None:
    rig = Rig()
    assert run_one(rig, "a", prompt_of(12), cache_salt="tenant 1") == 0
    assert run_one(rig, "b", prompt_of(12), cache_salt="tenant 2") == 0
    assert run_one(rig, "c", prompt_of(12)) == 0
    assert run_one(rig, "d", prompt_of(12), cache_salt="tenant 1") == 8
    assert run_one(rig, "e", prompt_of(12), skip_reading_prefix_cache=True) == 0
    off = Rig(enable_prefix_caching=False)
    assert run_one(off, "a", prompt_of(12)) == run_one(off, "b", prompt_of(12)) == 0
    assert off.scheduler.stats().num_cached_blocks == 0


def test_reset_forgets_what_is_cached_and_what_is_being_computed() -> None:
    rig = Rig()
    run_one(rig, "a", prompt_of(12))
    running = rig.add("running", prompt_of(12, first=20), max_tokens=20)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    assert rig.scheduler.stats().num_cached_blocks == 0
    rig.run()
    assert running.num_output_tokens == 20
    assert rig.scheduler.stats().num_cached_blocks == 0  # all of it rests on KV from before the reset
    assert run_one(rig, "b", prompt_of(12)) == 0
    assert run_one(rig, "c", prompt_of(12)) == 8


def test_the_least_recently_used_prefix_goes_first() -> None:
    rig = Rig(num_blocks=12, block_size=4)
    for name, first in [("a", 0), ("b", 20), ("a again", 0)]:
        run_one(rig, name, prompt_of(16, first=first), max_tokens=1)
    run_one(rig, "c", prompt_of(20, first=34), max_tokens=1)  # takes what was never used, then b's blocks
    assert run_one(rig, "a once more", prompt_of(16), max_tokens=1) == 12
    assert run_one(rig, "b again", prompt_of(16, first=20), max_tokens=1) < 12


# ---- the second tier -----------------------------------------------------------------------------


def evict(rig: Rig, name: str) -> None:
    """Takes every block of the pool once."""
    longest = (rig.config.num_blocks - 1) * rig.config.block_size
    run_one(rig, name, [48] * longest, max_tokens=1, skip_reading_prefix_cache=True)


def test_an_evicted_prefix_comes_back_from_the_cpu() -> None:
    rig = Rig(num_blocks=8, num_cpu_blocks=12)
    rig.scheduler.costs.swap_bytes_per_second = 1e15
    run_one(rig, "a", prompt_of(21))
    evict(rig, "evict")
    assert rig.batch.swaps_in == []
    assert rig.scheduler.counters.num_blocks_swapped_out > 0
    computed = rig.runner.num_computed
    assert run_one(rig, "a again", prompt_of(21)) == 20
    assert rig.runner.num_computed - computed == 21 - 20 + 2
    counters = rig.scheduler.counters
    assert 0 < counters.cpu_prefix_cache_hits <= counters.num_blocks_swapped_in * 4
    assert rig.outputs["a"] == rig.outputs["a again"]


def test_it_is_computed_again_if_that_is_cheaper() -> None:
    rig = Rig(num_blocks=8, num_cpu_blocks=12)
    rig.scheduler.costs.swap_bytes_per_second = 1.0
    run_one(rig, "a", prompt_of(21))
    evict(rig, "evict")
    assert run_one(rig, "a again", prompt_of(21)) < 20
    assert rig.scheduler.counters.num_blocks_swapped_in == 0
    assert rig.scheduler.counters.cpu_prefix_cache_hits == 0


def test_the_second_tier_is_off_with_the_prefix_cache() -> None:
    rig = Rig(num_blocks=8, num_cpu_blocks=12, enable_prefix_caching=False)
    run_one(rig, "a", prompt_of(21))
    evict(rig, "evict")
    assert rig.scheduler.counters.num_blocks_swapped_out == 0


@pytest.mark.parametrize("num_cpu_blocks", [1, 2, 5, 40])
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_both_tiers_under_pressure_serve_only_what_is_right(
    num_cpu_blocks: int, preemption_mode: str
) -> None:
    rig = Rig(
        num_blocks=10,
        num_cpu_blocks=num_cpu_blocks,
        preemption_mode=preemption_mode,
        max_model_len=36,
        max_num_batched_tokens=16,
    )
    rig.scheduler.costs.swap_bytes_per_second = 1e15
    for i in range(24):
        rig.add(f"r{i}", [*prompt_of(8 + i % 3 * 4, first=i % 4), i % 5], max_tokens=6 + i % 7)
        if i % 3 == 2:
            rig.step()
    rig.run()
    rig.check_outputs()
    assert rig.num_preemptions > 0
    assert rig.scheduler.counters.prefix_cache_hits > 0
