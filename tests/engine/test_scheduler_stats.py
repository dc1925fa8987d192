"""What the scheduler says about itself."""

from __future__ import annotations

import pytest

from pagedinfer.engine.scheduler import Scheduler, SchedulerConfig
from tests.engine.rig import Rig, make_request, prompt_of


def test_gauges_follow_the_requests() -> None:
    rig = Rig(num_blocks=20, block_size=4, max_num_seqs=2)
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.waiting_reason) == (0, 0, 0, None)
    assert stats.kv_cache_usage == stats.cpu_cache_usage == stats.prefix_cache_hit_rate == 0.0
    assert stats.kv_utilization == 1.0
    for i in range(3):
        rig.add(f"r{i}", prompt_of(6, first=10 * i), max_tokens=8)
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.waiting_reason) == (2, 1, "slots")
    assert stats.num_used_blocks == 4
    assert stats.kv_cache_usage == pytest.approx(4 / 20)
    assert stats.num_allocated_kv_tokens == 16
    assert stats.num_used_kv_tokens == 12
    assert stats.kv_utilization == pytest.approx(12 / 16)
    assert stats.num_reserved_kv_tokens == 2 * 16  # 6 + 8 tokens, but the last one's KV
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_cached_blocks > 0
    counters = stats.counters
    assert counters.num_finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert counters.num_prompt_tokens == 18
    assert counters.num_generated_tokens == 24
    assert counters.num_scheduled_tokens == 3 * (6 + 8 - 1)


def test_gauges_are_zero_after_everything_is_aborted() -> None:
    """vllm#22545, vllm#29928: gauges stuck after aborting everything, a counter went negative."""
    rig = Rig(max_num_seqs=4, num_blocks=10, num_cpu_blocks=10, preemption_mode="swap", max_model_len=40)
    for i in range(20):
        rig.add(f"r{i}", prompt_of(9, first=i), max_tokens=20)
    rig.fork("r0", "fork", prompt_of(9), max_tokens=20)
    rig.step_until(lambda: rig.scheduler.stats().num_swapped)
    for request_id in list(rig.scheduler.requests):
        rig.scheduler.abort_request(request_id)
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert (stats.num_used_blocks, stats.num_used_cpu_blocks) == (0, 0)
    assert stats.counters.num_finished["abort"] + stats.counters.num_finished["length"] == 21
    rig.check_all_free()


def test_why_the_first_waiting_request_waits() -> None:
    rig = Rig(max_num_batched_tokens=8, num_blocks=8, max_num_seqs=3, max_model_len=32)
    rig.add("a", prompt_of(8), max_tokens=10)
    rig.add("b", prompt_of(20, first=20), max_tokens=4)
    rig.step()
    assert rig.scheduler.waiting_reason == "tokens"
    rig.step()
    assert rig.scheduler.waiting_reason is None
    rig.add("c", prompt_of(16, first=30), max_tokens=4)
    rig.step()
    assert rig.scheduler.waiting_reason == "tokens"
    rig.step_until(lambda: rig.requests["b"].num_output_tokens)
    rig.step()
    assert rig.scheduler.waiting_reason == "blocks"
    rig.run()
    assert rig.scheduler.waiting_reason is None


def test_prefix_counters_count_tokens() -> None:
    rig = Rig(block_size=4)
    for name in ("a", "b"):
        rig.add(name, prompt_of(10), max_tokens=2)
        rig.run()
    counters = rig.scheduler.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (20, 8)
    assert rig.scheduler.stats().prefix_cache_hit_rate == pytest.approx(0.4)


def test_a_step_without_work_counts_for_nothing() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, max_model_len=16, max_num_batched_tokens=16))
    assert scheduler.schedule().is_empty()
    assert scheduler.counters.num_steps == 0
    assert not scheduler.has_unfinished_requests()
    scheduler.add_request(make_request("a", [1]))
    scheduler.abort_request("a")
    assert scheduler.schedule().is_empty()
