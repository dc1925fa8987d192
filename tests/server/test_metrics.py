"""Metrics: names, values, and that they come back to zero."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedinfer.server.histogram import Histogram, ladder
from pagedinfer.server.metrics import Metrics
from tests.server.rig import ServerThread, wait_until

GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "kv_cache_usage_peak_perc",
    "cpu_cache_usage_perc",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
]
COUNTERS = [
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "engine_busy_seconds_total",
    "admission_rejections_total",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
]


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerThread]:
    settings = {"served_model_names": ("m",), "max_num_queued_requests": 30}
    with ServerThread(model, settings=settings, scripted=True, max_num_seqs=4) as server:
        yield server


def test_every_name_is_there_under_both_prefixes(server: ServerThread) -> None:
    server.complete("abc", max_tokens=5)
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.body.decode()
    for prefix in ("pagedinfer_", "vllm:"):
        for name in GAUGES + COUNTERS:
            assert f'{prefix}{name}{{model_name="m"}} ' in text
        for name in HISTOGRAMS:
            assert f'{prefix}{name}_bucket{{le="+Inf",model_name="m"}} ' in text
            assert f'{prefix}{name}_sum{{model_name="m"}} ' in text
            assert f'{prefix}{name}_count{{model_name="m"}} ' in text
        assert f"{prefix}cache_config_info{{" in text
        for reason in ("slots", "blocks", "tokens"):
            assert f'{prefix}limited_by{{model_name="m",reason="{reason}"}} ' in text
        for reason in ("stop", "length", "abort", "error"):
            assert f'{prefix}request_success_total{{finished_reason="{reason}",model_name="m"}} ' in text
    assert "_created" not in text
    assert "process_resident_memory_bytes" in text
    open_metrics = server.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert open_metrics.body.endswith(b"# EOF\n")


def test_both_prefixes_show_the_same(server: ServerThread) -> None:
    text = server.get("/metrics").body.decode()
    ours = re.findall(r"^pagedinfer_(.*)$", text, re.MULTILINE)
    theirs = re.findall(r"^vllm:(.*)$", text, re.MULTILINE)
    assert ours == theirs
    assert len(ours) > 100


def test_they_count_what_happens(server: ServerThread) -> None:
    names = ["prompt_tokens_total", "generation_tokens_total", "request_generation_tokens_sum"]
    names += ["time_to_first_token_seconds_count", "inter_token_latency_seconds_count"]
    before = [server.metric("pagedinfer_" + name) for name in names]
    lengths = server.metric("vllm:request_success_total", finished_reason="length")
    for _ in range(3):
        server.complete("abc", max_tokens=5)
    after = [server.metric("pagedinfer_" + name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [9, 15, 15, 3, 12]
    assert server.metric("vllm:request_success_total", finished_reason="length") == lengths + 3


def test_everything_is_back_after_all_are_aborted(server: ServerThread) -> None:
    """vllm#22545, vllm#29928, vllm#6642."""
    aborted = server.metric("pagedinfer_request_success_total", finished_reason="abort")
    bodies = [{"prompt": "abc", "max_tokens": 500, "cache_salt": "slow:0.01"}] * 20
    streams = [server.open_stream("/v1/completions", body) for body in bodies]
    with ThreadPoolExecutor(20) as pool:
        # Answers begin with their first token: those that wait have none yet.
        opened = [pool.submit(stream.__enter__) for stream in streams]
        wait_until(lambda: server.metric("pagedinfer_num_requests_running") == 4)
        wait_until(lambda: server.metric("pagedinfer_num_requests_waiting") == 16)
        assert server.metric("pagedinfer_limited_by", reason="slots") == 1
        assert server.metric("pagedinfer_num_requests_in_flight") == 20
        server.abort_all()
        for future in opened:
            future.result(20)
    for stream in streams:
        stream.__exit__(None, None, None)
    for name in ("running", "waiting", "swapped", "in_flight"):
        wait_until(lambda name=name: server.metric(f"pagedinfer_num_requests_{name}") == 0)
    wait_until(lambda: server.metric("pagedinfer_kv_cache_usage_perc") == 0)
    assert server.metric("pagedinfer_request_success_total", finished_reason="abort") == aborted + 20
    assert server.metric("pagedinfer_limited_by") == 0
    assert server.metric("pagedinfer_limited_steps_total", reason="slots") > 0
    assert server.complete("abc", max_tokens=3).status == 200


def test_a_full_queue_is_a_503_that_says_when_to_come_again(server: ServerThread) -> None:
    bodies = [{"prompt": "abc", "max_tokens": 400, "cache_salt": "slow:0.01"}] * 34
    refused = server.metric("pagedinfer_admission_rejections_total")
    with ThreadPoolExecutor(34) as pool:
        streams = [server.open_stream("/v1/completions", body) for body in bodies]
        opened = [pool.submit(stream.__enter__) for stream in streams]
        wait_until(lambda: server.metric("pagedinfer_num_requests_in_flight") == 34)
        answer = server.complete("abc")
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "max_num_queued_requests is 30" in answer.error["message"]
        assert server.metric("pagedinfer_admission_rejections_total") == refused + 1
        server.abort_all()
        for future in opened:
            future.result(20)
    for stream in streams:
        stream.__exit__(None, None, None)
    assert server.complete("abc", max_tokens=3).status == 200


def test_without_vllm_s_names(model: str) -> None:
    with ServerThread(model, settings={"vllm_metrics": False}, scripted=True) as server:
        text = server.get("/metrics").body
        assert b"pagedinfer_num_requests_running" in text
        assert b"vllm" not in text


@given(st.lists(st.floats(0, 2000)))
def test_a_histogram_counts_by_inclusive_bounds(values: list[float]) -> None:
    histogram = Histogram(ladder(0.001, 1000))
    for value in values:
        histogram.observe(value)
    buckets = histogram.buckets()
    assert buckets[-1] == ("+Inf", len(values))
    for bound, count in buckets[:-1]:
        assert count == sum(value <= float(bound) for value in values)
    assert histogram.total == pytest.approx(sum(values))


def test_a_scrape_of_a_loading_server_works() -> None:
    text, _ = Metrics("m").exposition("")
    assert b'pagedinfer_num_requests_running{model_name="m"} 0.0' in text
