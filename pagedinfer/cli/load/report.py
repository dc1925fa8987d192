"""From times to figures, by vLLM's definitions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pagedinfer.cli.load.run import Result

_METRICS = ("ttft", "tpot", "e2el")
_PERCENTILES = (90, 99)


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Limits of goodput in milliseconds, from words such as "ttft:200".

    Raises:
        ValueError: something else.
    """
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in _METRICS or not limits[name] > 0:
            raise ValueError(f"--goodput takes limits in ms such as ttft:200 tpot:50 e2el:5000, got {word!r}")
    return limits


def time_per_output_token(result: Result) -> float | None:
    """The time after the first token, over the number of tokens after it; None if there are none."""
    if result.num_output_tokens < 2:
        return None
    return (result.latency - result.ttft) / (result.num_output_tokens - 1)


def report(results: Sequence[Result], seconds: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run; latencies are in milliseconds.

    Args:
        results: of all requests.
        seconds: that the run took.
        limits: of goodput, in milliseconds, by "ttft", "tpot" and "e2el"; none: no goodput.
    """
    good = [result for result in results if not result.error]
    num_prompt_tokens = sum(result.num_prompt_tokens for result in good)
    num_output_tokens = sum(result.num_output_tokens for result in good)
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(results) - len(good),
        "duration_s": seconds,
        "total_input_tokens": num_prompt_tokens,
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output_tokens / seconds,
        "total_token_throughput": (num_prompt_tokens + num_output_tokens) / seconds,
    }
    if limits:
        kept = sum(_keeps(result, limits) for result in good)
        figures["request_goodput"] = kept / seconds
    tpots = [tpot for result in good if (tpot := time_per_output_token(result)) is not None]
    for name, values in (
        ("ttft", [result.ttft for result in good]),
        ("tpot", tpots),
        ("itl", [gap for result in good for gap in result.itl]),
        ("e2el", [result.latency for result in good]),
    ):
        figures |= _summary(name, [1000 * value for value in values])
    return figures


def _keeps(result: Result, limits: Mapping[str, float]) -> bool:
    times = {"ttft": result.ttft, "tpot": time_per_output_token(result) or 0.0, "e2el": result.latency}
    return all(1000 * times[name] <= limit for name, limit in limits.items())


def _summary(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    figures = {f"mean_{name}_ms": statistics.fmean(values), f"median_{name}_ms": statistics.median(values)}
    return figures | {f"p{p}_{name}_ms": percentile(values, p) for p in _PERCENTILES}


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation, as numpy's."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


_TITLES = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration_s": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests a second",
    "request_goodput": "Goodput, requests a second",
    "output_throughput": "Output tokens a second",
    "total_token_throughput": "Tokens a second",
}


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""
    lines = []
    for name, title in _TITLES.items():
        if name in figures:
            decimals = 0 if isinstance(figures[name], int) else 2
            lines.append(f"{title:<32}{figures[name]:>12,.{decimals}f}")
    columns = ("mean", "median", *(f"p{p}" for p in _PERCENTILES))
    lines += ["", f"{'ms':<8}" + "".join(f"{column:>12}" for column in columns)]
    for name in ("ttft", "tpot", "itl", "e2el"):
        if f"mean_{name}_ms" in figures:
            values = [figures[f"{column}_{name}_ms"] for column in columns]
            lines.append(f"{name.upper():<8}" + "".join(f"{value:>12.2f}" for value in values))
    return "\n".join(lines)
