"""The scheduler under a fake runner: batching, budgets, preemption, stopping, refusal, abort."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedinfer
from pagedinfer.engine.batch import StepOutput
from pagedinfer.engine.request import RequestStatus
from pagedinfer.errors import RequestTooLargeError
from tests.engine.rig import Rig, prompt_of

EOS = 49


@pytest.mark.parametrize("budget", [1, 3, 16, 10_000])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_every_schedule_gives_the_same_tokens(budget: int, caching: bool, num_blocks: int) -> None:
    rig = Rig(max_num_batched_tokens=budget, enable_prefix_caching=caching, num_blocks=num_blocks)
    for i in range(6):
        rig.add(f"r{i}", prompt_of(3 * i + 1, first=i % 2), max_tokens=12)
    rig.run()
    rig.check_outputs()
    assert all(len(output) == 12 for output in rig.outputs.values())
    preemptions = sum(request.num_preemptions for request in rig.requests.values())
    assert (preemptions > 0) == (num_blocks == 8 and budget > 1)


def test_prompt_chunks_and_decodes_share_a_step() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt_of(4), max_tokens=10)
    rig.step()
    rig.add("long", prompt_of(20), max_tokens=2)
    batch = rig.scheduler.schedule()
    assert [(work.request_id, work.start, work.num_tokens, work.sample) for work in batch.requests] == [
        ("a", 4, 1, True),
        ("long", 4, 7, False),  # its first block is in the prefix cache
    ]


def test_a_long_prompt_in_front_leaves_the_others_their_next_token() -> None:
    rig = Rig(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=128, scheduling_policy="priority")
    for name in "abcd":
        rig.add(name, [40], max_tokens=40)
    rig.step()
    rig.add("long", prompt_of(60), max_tokens=2, priority=-1)
    for _ in range(3):
        batch = rig.scheduler.schedule()
        rig.scheduler.update(batch, rig.runner.execute(batch).result())
    assert [(work.request_id, work.num_tokens) for work in batch.requests] == [
        ("long", 4),
        *((name, 1) for name in "abcd"),
    ]


def test_a_threshold_caps_what_one_prompt_takes_of_a_step() -> None:
    rig = Rig(max_num_batched_tokens=32, long_prefill_token_threshold=10, max_num_seqs=8)
    rig.add("a", [40], max_tokens=20)
    rig.step()
    rig.add("long", prompt_of(60), max_tokens=2)
    rig.add("short", prompt_of(7, first=9), max_tokens=2)
    rig.step()
    assert [(work.request_id, work.num_tokens) for work in rig.batch.requests] == [
        ("a", 1),
        ("long", 10),
        ("short", 7),
    ]
    rig.step()
    assert [(work.request_id, work.num_tokens) for work in rig.batch.requests][:2] == [("a", 1), ("long", 10)]
    rig.run()
    rig.check_outputs()


def test_without_chunks_a_prompt_is_computed_in_one_step() -> None:
    rig = Rig(max_num_batched_tokens=64, enable_chunked_prefill=False, enable_prefix_caching=False)
    for i, length in enumerate([40, 30, 20, 5]):
        rig.add(f"r{i}", prompt_of(length, first=i), max_tokens=3)
    rig.step()
    # The second does not fit into what is left of the step, and nobody overtakes it.
    assert [(work.request_id, work.num_tokens) for work in rig.batch.requests] == [("r0", 40)]
    rig.step()
    assert [work.num_tokens for work in rig.batch.requests] == [1, 30, 20, 5]
    rig.run()
    rig.check_outputs()


@pytest.mark.parametrize("budget", [16, 10_000])
def test_chunks_of_many_prompts_without_a_prefix_cache(budget: int) -> None:
    """sglang PR#2282: chunked prefill with the prefix cache off hit an assertion."""
    rig = Rig(max_num_batched_tokens=budget, enable_prefix_caching=False, max_num_seqs=2, max_model_len=128)
    for i in range(3):
        rig.add(f"r{i}", prompt_of(100, first=i), max_tokens=5)
    rig.run()
    rig.check_outputs()
    assert rig.runner.num_computed == 3 * 104


def test_blocks_are_allocated_as_needed() -> None:
    rig = Rig(block_size=4)
    request = rig.add("a", prompt_of(5), max_tokens=50)
    rig.step()
    assert len(request.block_ids) == 2
    for _ in range(4):
        rig.step()
    assert request.num_computed_tokens == 9
    assert len(request.block_ids) == 3


def test_what_a_request_that_nobody_watches_has_computed_can_be_shared_at_once() -> None:
    rig = Rig(block_size=4)
    request = rig.add("unwatched", prompt_of(4), max_tokens=20, reports_at_end=True)
    for num_tokens in (9, 14):  # all but the last are computed
        while request.num_tokens < num_tokens:
            rig.step()
        other = rig.add(f"after {num_tokens}", request.token_ids.copy(), max_tokens=1)
        rig.step()
        assert other.num_cached_tokens == (num_tokens - 1) // 4 * 4
    rig.run()
    rig.check_outputs()
    assert rig.ends["unwatched"] == ("length", None)


def test_the_youngest_is_preempted_and_is_not_in_that_batch() -> None:
    rig = Rig(num_blocks=5, enable_prefix_caching=False, max_model_len=21)
    old = rig.add("old", prompt_of(8), max_tokens=12)
    young = rig.add("young", prompt_of(8), max_tokens=12)
    while young.num_preemptions == 0:
        batch = rig.scheduler.schedule()
        rig.apply(rig.scheduler.update(batch, rig.runner.execute(batch).result()))
    assert [work.request_id for work in batch.requests] == ["old"]
    assert young.status is RequestStatus.WAITING
    assert old.num_preemptions == 0
    rig.run()
    rig.check_outputs()


def test_a_preempted_request_goes_before_one_that_never_ran() -> None:
    rig = Rig(num_blocks=5, enable_prefix_caching=False, max_model_len=21, max_num_seqs=2)
    rig.add("old", prompt_of(8), max_tokens=12)
    young = rig.add("young", prompt_of(8), max_tokens=12)
    rig.add("new", prompt_of(4), max_tokens=1)
    while young.num_preemptions == 0:
        rig.step()
    assert [request.request_id for request in rig.scheduler.waiting] == ["young", "new"]
    rig.run()


@pytest.mark.parametrize(
    ("fields", "forced", "end", "length"),
    [
        ({"max_tokens": 3}, [1, 2, 3], ("length", None), 3),
        ({}, [1, EOS], ("stop", None), 2),
        ({"max_tokens": 2}, [1, EOS], ("stop", None), 2),  # vllm PR#14624: EOS as the last token allowed
        ({"max_tokens": 3, "ignore_eos": True}, [1, EOS, 2], ("length", None), 3),
        ({"stop_token_ids": [7]}, [1, 7], ("stop", 7), 2),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], ("stop", EOS), 1),
        ({"min_tokens": 3}, [EOS] * 9, ("stop", None), 4),  # vllm#21987
        ({"stop_token_ids": [7], "min_tokens": 2}, [7] * 9, ("stop", 7), 3),
        ({"max_tokens": None}, [1] * 99, ("length", None), 59),  # up to max_model_len
        ({"max_tokens": 200, "min_tokens": 200, "ignore_eos": True}, [1] * 99, ("length", None), 59),
    ],
)
def test_what_ends_a_request(
    fields: dict[str, Any], forced: list[int], end: tuple[str, int | None], length: int
) -> None:
    rig = Rig()
    request = rig.add("a", prompt_of(5), eos_token_ids=frozenset([EOS]), **fields)
    rig.runner.forced_tokens["a"] = forced
    rig.run()
    assert rig.ends["a"] == end
    assert len(rig.outputs["a"]) == length
    assert request.status.finish_reason == end[0]


def test_a_token_that_could_not_be_sampled_ends_its_request_only() -> None:
    rig = Rig()
    rig.add("bad", prompt_of(9), max_tokens=8)
    rig.add("good", prompt_of(9, first=3), max_tokens=8)
    rig.runner.forced_tokens["bad"] = [5, -1]
    rig.run()
    assert rig.ends == {"bad": ("error", None), "good": ("length", None)}
    assert rig.outputs["bad"] == [5]
    assert rig.scheduler.counters.num_generated_tokens == 1 + 8
    again = rig.add("again", prompt_of(9), max_tokens=8)
    rig.run()
    assert again.num_cached_tokens == 0  # nobody shares the blocks of a request that went wrong


def test_a_prompt_of_the_longest_context_is_refused_and_one_token_less_runs() -> None:
    """vllm#16445, vllm PR#36789."""
    rig = Rig(max_model_len=16)
    for length in (16, 17):
        with pytest.raises(RequestTooLargeError, match=rf"{length} tokens.*max_model_len=16"):
            rig.add("a", prompt_of(length))
    rig.add("a", prompt_of(15), max_tokens=5)
    rig.run()
    assert rig.ends["a"] == ("length", None)
    assert len(rig.outputs["a"]) == 1


def test_a_request_that_can_never_fit_is_refused_with_both_sizes() -> None:
    rig = Rig(num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(RequestTooLargeError, match=r"for 17 tokens.*room for 16.*kv_cache_memory_bytes"):
        rig.add("big", prompt_of(10), max_tokens=8)
    rig.add("fits", prompt_of(10), max_tokens=7)  # the last token's KV is not needed
    rig.run()
    assert len(rig.outputs["fits"]) == 7


def test_malformed_requests_are_value_errors() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="prompt is empty"):
        rig.add("a", [])
    rig.add("a", [1])
    with pytest.raises(ValueError, match="unfinished request 'a'"):
        rig.add("a", [1])
    with pytest.raises(ValueError, match="finished status"):
        rig.scheduler.finish_request("a", RequestStatus.RUNNING)
    batch = rig.scheduler.schedule()
    output = rig.runner.execute(batch).result()
    rig.scheduler.update(batch, output)
    with pytest.raises(ValueError, match="updated already"):
        rig.scheduler.update(batch, output)


@pytest.mark.parametrize(
    ("num_tokens", "num_logprobs", "message"),
    [(2, 1, "drew 1 tokens, its output has 2$"), (1, 2, "drew 1 tokens, its output has 2 logprobs")],
)
def test_an_output_of_another_size_is_a_value_error(num_tokens: int, num_logprobs: int, message: str) -> None:
    rig = Rig()
    rig.add("a", [1])
    output = StepOutput(np.zeros(num_tokens, np.int64), np.zeros(num_logprobs, np.float32))
    with pytest.raises(ValueError, match=message):
        rig.scheduler.update(rig.scheduler.schedule(), output)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted"])
def test_abort_frees_everything_at_once(when: str) -> None:
    rig = Rig(num_blocks=5, max_num_batched_tokens=6, max_model_len=21, max_num_seqs=2)
    rig.add("old", prompt_of(8), max_tokens=12)
    request = rig.add("a", prompt_of(8, first=9), max_tokens=12)
    reached = {
        "waiting": lambda: True,
        "prefill": lambda: 0 < request.num_computed_tokens < 8,
        "decode": lambda: request.num_output_tokens > 1,
        "preempted": lambda: request.num_preemptions > 0,
    }[when]
    while not reached():
        rig.step()
    assert rig.scheduler.abort_request("a")
    assert not rig.scheduler.abort_request("a")
    assert not rig.scheduler.abort_request("never seen")
    assert request.status.finish_reason == "abort"
    assert request.block_ids == []
    held = len(rig.requests["old"].block_ids)
    assert rig.scheduler.kv.num_free == 5 - held
    rig.run()
    rig.check_outputs()


def test_a_stop_string_found_outside_ends_a_request() -> None:
    rig = Rig()
    request = rig.add("a", prompt_of(5), max_tokens=50)
    rig.step()
    assert rig.scheduler.finish_request("a", RequestStatus.FINISHED_STOPPED, "stop here")
    assert (request.status.finish_reason, request.stop_reason) == ("stop", "stop here")
    rig.check_all_free()


def test_abort_all_leaves_a_usable_scheduler() -> None:
    rig = Rig()
    rig.add("a", prompt_of(9))
    rig.step()
    rig.add("b", prompt_of(12, first=5))
    rig.scheduler.schedule()  # fails: never executed
    assert [request.request_id for request in rig.scheduler.abort_all()] == ["a", "b"]
    assert rig.scheduler.counters.num_preemptions == 0
    rig.check_all_free()
    rig.outputs.clear()
    rig.add("c", prompt_of(12, first=5))
    rig.run()
    rig.check_outputs()


@pytest.mark.parametrize("num_blocks", [6, 64])
def test_the_next_step_may_be_scheduled_before_the_last_is_known(num_blocks: int) -> None:
    rig = Rig(num_blocks=num_blocks, max_num_batched_tokens=12)
    for i in range(6):
        rig.add(f"r{i}", prompt_of(2 * i + 1, first=i), max_tokens=9 + i, eos_token_ids=frozenset([0, 1, 2]))
    in_flight: list[Any] = []
    for _ in range(1000):
        batch = rig.scheduler.schedule()
        if not batch.is_empty():
            in_flight.append((batch, rig.runner.execute(batch)))
        if len(in_flight) > 1 or (batch.is_empty() and in_flight):
            batch, handle = in_flight.pop(0)
            rig.apply(rig.scheduler.update(batch, handle.result()))
        if not in_flight and not rig.scheduler.has_unfinished_requests():
            break
    rig.check_all_free()
    rig.check_outputs()
    assert {end for end, _ in rig.ends.values()} == {"stop", "length"}
    assert any(request.num_preemptions for request in rig.requests.values()) == (num_blocks == 6)


def test_bad_limits_are_refused() -> None:
    for fields, message in [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks must not be negative"),
        ({"scheduling_policy": "lifo"}, "one of 'fcfs', 'priority', got 'lifo'"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\)"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens is 32, max_model_len is 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            Rig(**fields)


# What stands between a request and a batch: must be quick to import and to test.
SCHEDULER_MODULES = [
    "admission",
    "batch",
    "forks",
    "kv_cache_manager",
    "preemption",
    "request",
    "request_queue",
    "request_update",
    "running_requests",
    "scheduler",
    "scheduler_config",
    "size_limits",
    "stats",
    "step_planner",
]


def test_the_scheduler_does_not_import_torch() -> None:
    names = ", ".join(f"pagedinfer.engine.{name}" for name in SCHEDULER_MODULES)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_pickled_or_hashed_by_python() -> None:
    """CVE-2025-30165, vllm#29565: block hashes came from pickle and hash()."""
    package = Path(pagedinfer.__file__).parent
    for name in SCHEDULER_MODULES:
        tree = ast.parse((package / "engine" / f"{name}.py").read_text())
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not imported & {"pickle", "marshal", "shelve"}, name
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "hash" not in called, name


@pytest.mark.parametrize("threshold", [0, 8, 10])
def test_prompts_in_chunks_that_begin_alike_are_computed_once(threshold: int) -> None:
    rig = Rig(long_prefill_token_threshold=threshold, max_num_batched_tokens=24, num_blocks=64)
    shared = prompt_of(40)
    for i in range(4):
        rig.add(f"r{i}", [*shared, 40 + i], max_tokens=4)
    rig.run()
    rig.check_outputs()
    assert rig.runner.num_computed == 40 + 4 * (1 + 3)


def test_prompts_that_begin_alike_under_another_salt_do_not_wait() -> None:
    rig = Rig(long_prefill_token_threshold=8)
    for i in range(2):
        rig.add(f"r{i}", prompt_of(41), max_tokens=1, cache_salt=str(i))
    rig.step()
    assert len(rig.batch.requests) == 2
    rig.run()
    rig.check_outputs()


def test_a_prompt_of_which_more_is_known_than_a_running_one_has_computed_does_not_wait() -> None:
    rig = Rig(long_prefill_token_threshold=8)
    rig.add("known", prompt_of(40), max_tokens=1)
    rig.run()
    rig.add("other", prompt_of(40, first=9), max_tokens=1)
    rig.add("again", prompt_of(41), max_tokens=1)
    rig.step()
    assert len(rig.batch.requests) == 2
    rig.run()
    rig.check_outputs()
