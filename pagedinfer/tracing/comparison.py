"""Runs side by side: a table, and how many requests ran and waited over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagedinfer.tracing.simulation import Run, percentile

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60


def rows(runs: Sequence[Run]) -> list[tuple[str, list[float]]]:
    """(what, one value for each run)."""
    table = {
        "output tokens/s": [run.tokens_per_second for run in runs],
        "seconds in all": [run.seconds for run in runs],
        "steps": [float(len(run.load)) for run in runs],
        "wait for the first step, mean (ms)": [1e3 * _mean(run.waits()) for run in runs],
        "wait for the first step, p99 (ms)": [1e3 * percentile(run.waits(), 99) for run in runs],
        "first token, p50 (ms)": [1e3 * percentile(run.first_tokens(), 50) for run in runs],
        "first token, p99 (ms)": [1e3 * percentile(run.first_tokens(), 99) for run in runs],
        "each further token, p50 (ms)": [1e3 * percentile(run.token_times(), 50) for run in runs],
        "each further token, p99 (ms)": [1e3 * percentile(run.token_times(), 99) for run in runs],
        "preemptions": [float(run.num_preemptions) for run in runs],
        "refused": [float(run.num_refused) for run in runs],
        "running at once, most": [float(max((n for _, n, _ in run.load), default=0)) for run in runs],
        "waiting at once, most": [float(max((n for _, _, n in run.load), default=0)) for run in runs],
        "KV cache in use, most (%)": [100 * max(run.usage, default=0.0) for run in runs],
    }
    return list(table.items())


def text(runs: Sequence[Run]) -> str:
    """The table, and a line of bars for each run."""
    found = rows(runs)
    width = max(len(name) for name, _ in found)
    columns = [max(12, len(run.name)) for run in runs]
    lines = [
        " " * width + "".join(f"  {run.name:>{n}}" for run, n in zip(runs, columns, strict=True)),
    ]
    for name, values in found:
        cells = "".join(f"  {_number(value):>{n}}" for value, n in zip(values, columns, strict=True))
        lines.append(f"{name:<{width}}{cells}")
    longest = max((run.seconds for run in runs), default=0.0)
    highest = max((n for run in runs for _, *counts in run.load for n in counts), default=0)
    for run in runs:
        for what, index in (("running", 1), ("waiting", 2)):
            lines.append(f"{run.name}, {what}, 0 to {highest:,} over {longest:.2f} s")
            lines.append("  " + _bars(run, index, longest, highest))
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: str) -> None:
    """Draws running and waiting requests over time into a file, whose name says its format.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install pagedinfer[bench]") from error
    figure = Figure(figsize=(9, 2.4 * len(runs) + 0.8), layout="constrained")
    axes = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, run in zip(axes, runs, strict=True):
        start = min((times.arrived for times in run.times), default=0.0)
        seconds = [time - start for time, _, _ in run.load]
        axis.step(seconds, [n for _, n, _ in run.load], where="post", label="running")
        axis.step(seconds, [n for _, _, n in run.load], where="post", label="waiting")
        axis.set_title(f"{run.name}: {run.tokens_per_second:,.0f} output tokens/s", loc="left", fontsize=9)
        axis.set_ylabel("requests")
    axes[0].legend(frameon=False, loc="upper right")
    axes[-1].set_xlabel("seconds")
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"the plot cannot be written to {path!r}: {error}") from error


def _bars(run: Run, index: int, longest: float, highest: int) -> str:
    """The most requests of each stretch of time, as high as a character is."""
    if not run.load or not longest or not highest:
        return ""
    start = min(times.arrived for times in run.times)
    heights = np.zeros(_WIDTH)
    for step in run.load:
        place = min(_WIDTH - 1, max(0, int((step[0] - start) / longest * _WIDTH)))
        heights[place] = max(heights[place], step[index])
    return "".join(_BARS[round(height / highest * (len(_BARS) - 1))] for height in heights).rstrip()


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.2f}"
