"""Prometheus metrics: what the engine reports and what clients see, under our names and vLLM's.

Numbers are kept here as plain numbers and turned into metrics when somebody asks, so that a token costs
little, and both prefixes show the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pagedinfer.server import messages as wire
from pagedinfer.server.engine_observer import EngineObserver
from pagedinfer.server.histogram import Histogram, ladder

if TYPE_CHECKING:
    from pagedinfer.server.request_stream import RequestStream

_SECONDS = ladder(0.001, 1000)
_SHORT_SECONDS = ladder(0.0005, 10)
_TOKENS = ladder(1, 1_000_000)
_REASONS = ("stop", "length", "abort", "error")
_LIMITS = ("slots", "blocks", "tokens")


class Metrics(EngineObserver, Collector):
    """Told by an engine what happens; a collector of a Prometheus registry.

    Args:
        model_name: the value of the label `model_name`.
        vllm_names: export everything as vllm:* too.
    """

    def __init__(self, model_name: str, *, vllm_names: bool = True) -> None:
        self._model_name = model_name
        self._prefixes = ("pagedinfer_", "vllm:") if vllm_names else ("pagedinfer_",)
        self._limits: wire.EngineLimits | None = None
        self.stats: wire.EngineStats | None = None
        self._kv_cache_peak = 0.0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._finished = dict.fromkeys(_REASONS, 0)
        self.num_refused = 0
        self._num_requests = 0  # in flight
        self._time_to_first_token = Histogram(_SECONDS)
        self._inter_token = Histogram(_SHORT_SECONDS)
        self._per_output_token = Histogram(_SHORT_SECONDS)
        self._end_to_end = Histogram(_SECONDS)
        self._queue = Histogram(_SECONDS)
        self._prefill = Histogram(_SECONDS)
        self._decode = Histogram(_SECONDS)
        self._inference = Histogram(_SECONDS)
        self._prompt_tokens = Histogram(_TOKENS)
        self._generation_tokens = Histogram(_TOKENS)
        self._iteration_tokens = Histogram(_TOKENS)
        self._params_n = Histogram([1, 2, 5, 10, 20, 50, 100])
        self._params_max_tokens = Histogram(_TOKENS)
        self._preemptions = Histogram([0, 1, 2, 5, 10, 20])
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (self, *_of_this_process()):
            self._registry.register(collector)

    # ---- what happens ----

    def started(self, limits: wire.EngineLimits) -> None:
        self._limits = limits

    def refused(self) -> None:
        self.num_refused += 1

    def added(self, stream: RequestStream) -> None:
        params = stream.request.sampling_params
        self._num_requests += 1
        self._params_n.observe(params.n)
        if params.max_tokens is not None and self._limits is not None:  # as far as it means anything
            self._params_max_tokens.observe(min(params.max_tokens, self._limits.max_model_len))
        self._prompt_tokens.observe(len(stream.prompt.token_ids))

    def tokens(self, stream: RequestStream, count: int, now: float) -> None:
        if not count:
            return
        self.num_generated_tokens += count
        if stream.last_token_at:
            self._inter_token.observe(now - stream.last_token_at)
        else:
            self.num_prompt_tokens += len(stream.prompt.token_ids)
            self._time_to_first_token.observe(now - stream.metrics.queued_ts)
        stream.last_token_at = now

    def finished(self, stream: RequestStream) -> None:
        self._num_requests -= 1
        if stream.error is not None:
            self._finished["error"] += len(stream.choices)
        else:
            for choice in stream.choices:
                self._finished[choice.finish_reason or "error"] += 1
        metrics = stream.metrics
        self._end_to_end.observe(metrics.finished_ts - metrics.queued_ts)
        self._generation_tokens.observe(stream.num_tokens)
        self._preemptions.observe(metrics.num_preemptions)
        if not metrics.scheduled_ts:  # it has no times: aborted, or lost
            return
        self._queue.observe(max(0.0, metrics.scheduled_ts - metrics.queued_ts))
        self._prefill.observe(max(0.0, metrics.first_token_ts - metrics.scheduled_ts))
        self._decode.observe(metrics.last_token_ts - metrics.first_token_ts)
        self._inference.observe(max(0.0, metrics.last_token_ts - metrics.scheduled_ts))
        steps = stream.num_tokens // len(stream.choices) - 1
        if steps > 0:
            self._per_output_token.observe((metrics.last_token_ts - metrics.first_token_ts) / steps)

    def step(self, outputs: wire.Outputs) -> None:
        if outputs.num_step_tokens:
            self._iteration_tokens.observe(outputs.num_step_tokens)
        if outputs.stats is not None:
            self.stats = outputs.stats
            self._kv_cache_peak = max(self._kv_cache_peak, outputs.stats.kv_cache_usage)

    def died(self) -> None:
        if self.stats is not None:
            self.stats.num_running = self.stats.num_waiting = self.stats.num_swapped = 0
            self.stats.kv_cache_usage = self.stats.cpu_cache_usage = 0.0

    # ---- what is told ----

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text, and the text's content type, by the Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        for prefix in self._prefixes:
            yield from self._collect(prefix)

    def _collect(self, prefix: str) -> Iterator[Metric]:
        yield from self._gauges(prefix)
        yield from self._counters(prefix)
        yield from self._histograms(prefix)
        if self._limits is not None:
            info = InfoMetricFamily(
                f"{prefix}cache_config", "the KV cache and the limits", labels=["model_name"]
            )
            limits = self._limits
            values = {
                "block_size": limits.block_size,
                "num_gpu_blocks": limits.num_blocks,
                "num_cpu_blocks": limits.num_cpu_blocks,
                "enable_prefix_caching": limits.enable_prefix_caching,
                "cache_dtype": limits.dtype,
                "device": limits.device,
                **limits.settings,
            }
            info.add_metric([self._model_name], {name: str(value) for name, value in values.items()})
            yield info

    def _gauges(self, prefix: str) -> Iterator[Metric]:
        stats, limits = self.stats, self._limits
        reason = None if stats is None else stats.waiting_reason
        gauges = [
            ("num_requests_running", "requests that hold a slot", stats and stats.num_running),
            ("num_requests_waiting", "requests that wait for a slot or blocks", stats and stats.num_waiting),
            ("num_requests_swapped", "requests whose KV is in CPU memory", stats and stats.num_swapped),
            ("num_requests_in_flight", "requests that have an open answer", self._num_requests),
            ("kv_cache_usage_perc", "share of the KV blocks in use, 0 to 1", stats and stats.kv_cache_usage),
            ("gpu_cache_usage_perc", "the same under its older name", stats and stats.kv_cache_usage),
            ("kv_cache_usage_peak_perc", "the highest that was seen of it", self._kv_cache_peak),
            (
                "cpu_cache_usage_perc",
                "share of the CPU blocks in use, 0 to 1",
                stats and stats.cpu_cache_usage,
            ),
        ]
        if limits is not None:
            gauges += [
                ("max_num_seqs", "slots: requests that may run at once", limits.max_num_seqs),
                ("max_num_batched_tokens", "the most tokens of a step", limits.max_num_batched_tokens),
                ("max_model_len", "the longest context in tokens", limits.max_model_len),
                ("num_kv_blocks", "blocks of the KV cache", limits.num_blocks),
            ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(prefix + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], float(value or 0))
            yield gauge
        limited = GaugeMetricFamily(
            f"{prefix}limited_by",
            "1 for what the first waiting request lacks: slots, blocks, or tokens of the step",
            labels=["model_name", "reason"],
        )
        for name in _LIMITS:
            limited.add_metric([self._model_name, name], float(name == reason))
        yield limited

    def _counters(self, prefix: str) -> Iterator[Metric]:
        stats = self.stats
        counters = [
            ("prompt_tokens", "tokens of prompts", self.num_prompt_tokens),
            ("generation_tokens", "tokens generated", self.num_generated_tokens),
            ("admission_rejections", "requests that found the queue full", self.num_refused),
            (
                "num_preemptions",
                "requests that gave way to others",
                stats and stats.num_preemptions_swap + stats.num_preemptions_recompute,
            ),
            ("prefix_cache_queries", "tokens looked up", stats and stats.prefix_cache_queries),
            ("prefix_cache_hits", "tokens found", stats and stats.prefix_cache_hits),
            ("blocks_swapped_in", "blocks moved to the device", stats and stats.num_blocks_swapped_in),
            ("blocks_swapped_out", "blocks moved to the CPU", stats and stats.num_blocks_swapped_out),
            ("engine_steps", "steps with something to run", stats and stats.num_steps),
            (
                "scheduled_tokens",
                "tokens computed, recomputed ones included",
                stats and stats.num_scheduled_tokens,
            ),
            ("engine_busy_seconds", "time spent in steps", stats and stats.step_seconds),
        ]
        for name, text, value in counters:
            counter = CounterMetricFamily(prefix + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], float(value or 0))
            yield counter
        preemptions = CounterMetricFamily(
            f"{prefix}preemptions_by_mode",
            "the same by what became of their KV",
            labels=["model_name", "mode"],
        )
        preemptions.add_metric([self._model_name, "swap"], float(stats.num_preemptions_swap if stats else 0))
        preemptions.add_metric(
            [self._model_name, "recompute"], float(stats.num_preemptions_recompute if stats else 0)
        )
        yield preemptions
        finished = CounterMetricFamily(
            f"{prefix}request_success",
            "choices that have ended, by how",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._finished.items():
            finished.add_metric([self._model_name, reason], float(count))
        yield finished
        limited = CounterMetricFamily(
            f"{prefix}limited_steps",
            "steps after which a request waited, by what it lacked",
            labels=["model_name", "reason"],
        )
        for name in _LIMITS:
            limited.add_metric(
                [self._model_name, name], float(stats.limited_steps.get(name, 0) if stats else 0)
            )
        yield limited

    def _histograms(self, prefix: str) -> Iterator[Metric]:
        histograms = [
            ("time_to_first_token_seconds", "from a request's arrival", self._time_to_first_token),
            ("inter_token_latency_seconds", "between two outputs of a request", self._inter_token),
            ("time_per_output_token_seconds", "the same under its older name", self._inter_token),
            (
                "request_time_per_output_token_seconds",
                "of a request, after its first token, on average",
                self._per_output_token,
            ),
            ("e2e_request_latency_seconds", "from arrival to end", self._end_to_end),
            ("request_queue_time_seconds", "from arrival to being scheduled first", self._queue),
            ("request_prefill_time_seconds", "from there to the first token", self._prefill),
            ("request_decode_time_seconds", "from there to the last", self._decode),
            ("request_inference_time_seconds", "from being scheduled to the last token", self._inference),
            ("request_prompt_tokens", "of a request", self._prompt_tokens),
            ("request_generation_tokens", "of a request, all choices", self._generation_tokens),
            ("iteration_tokens_total", "computed in a step", self._iteration_tokens),
            ("request_params_n", "of a request", self._params_n),
            ("request_params_max_tokens", "of a request", self._params_max_tokens),
            ("request_num_preemptions", "of a request", self._preemptions),
        ]
        for name, text, histogram in histograms:
            family = HistogramMetricFamily(prefix + name, text, labels=["model_name"])
            family.add_metric([self._model_name], histogram.buckets(), histogram.total)
            yield family


def _of_this_process() -> list[Collector]:
    """Memory, CPU time and garbage collection of the API process."""
    nowhere = CollectorRegistry()  # each registers itself, and would with the global one
    return [
        ProcessCollector(registry=nowhere),
        PlatformCollector(registry=nowhere),
        GCCollector(registry=CollectorRegistry()),
    ]


class ThroughputLog:
    """A line every so often while there is work, and none while there is not."""

    SECONDS = 10.0

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._at = time.monotonic()
        self._prompt = self._generated = 0
        self._was_busy = False

    def line(self, now: float) -> str | None:
        """What to log at this time of the monotonic clock; None: nothing."""
        metrics, stats = self._metrics, self._metrics.stats
        seconds, self._at = now - self._at, now
        prompt, self._prompt = metrics.num_prompt_tokens - self._prompt, metrics.num_prompt_tokens
        generated, self._generated = (
            metrics.num_generated_tokens - self._generated,
            metrics.num_generated_tokens,
        )
        if stats is None or seconds <= 0:
            return None
        busy = bool(prompt or generated or stats.num_running or stats.num_waiting)
        if not busy and not self._was_busy:
            return None
        self._was_busy = busy
        queries = stats.prefix_cache_queries
        hits = 100 * stats.prefix_cache_hits / queries if queries else 0.0
        return (
            f"prompts {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s; "
            f"running {stats.num_running}, waiting {stats.num_waiting}, swapped {stats.num_swapped}; "
            f"KV cache {100 * stats.kv_cache_usage:.1f} % used, prefix hits {hits:.1f} %"
        )
