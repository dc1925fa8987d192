"""How the kernel benchmarks time, and how they write down what they found.

A kernel is timed over several buffers in turn, together larger than the GPU's second-level cache, so that
every call finds its inputs in memory; all calls stand in one CUDA graph, as often as it takes to fill a
millisecond, so that neither a launch from Python nor the graph's own is in the figure; the median of many
replays is reported, with the spread.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROTATED_BYTES = 400e6
"""What the buffers of a row hold together: several times the 60 MB of second-level cache of an H200."""

GRAPH_SECONDS = 1e-3
"""A graph lasts at least so long: its launch costs some microseconds, 0.3 to 2 a call in a graph of few."""


def require_gpu() -> None:
    """Ends a script that is of no use here, with a sentence."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name} measures a GPU, and torch sees none")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    median: float
    low: float
    """10th percentile of the replays."""
    high: float
    """90th percentile."""
    replays: int

    def columns(self) -> dict[str, float]:
        """Of a row, in microseconds."""
        return {"us": self.median * 1e6, "low": self.low * 1e6, "high": self.high * 1e6}


def rotations(bytes_of_a_call: float, most: int = 32) -> int:
    """How many sets of buffers a row needs."""
    return max(2, min(most, int(ROTATED_BYTES / max(bytes_of_a_call, 1)) + 1))


def time_calls(calls: Sequence[Callable[[], object]], *, seconds: float = 0.3, graph: bool = True) -> Timing:
    """Times `calls`, each over buffers of its own, run one after another.

    Args:
        calls: the same work over different buffers. Each is called once for warm-up.
        seconds: about how long the timed replays may take together; there are 10 to 100.
        graph: capture the calls in a CUDA graph; False for what cannot be captured.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = 1
    if graph:
        replay = _captured(calls)
        _seconds_of(replay)
        rounds = max(1, math.ceil(GRAPH_SECONDS / max(_seconds_of(replay), 1e-6)))
        if rounds > 1:
            replay = _captured(list(calls) * rounds)
    else:
        replay = lambda: [call() for call in calls]  # noqa: E731

    _seconds_of(replay)
    replays = max(10, min(100, int(seconds / max(_seconds_of(replay), 1e-6))))
    times = sorted(_seconds_of(replay) / (len(calls) * rounds) for _ in range(replays))
    return Timing(times[replays // 2], times[replays // 10], times[-1 - replays // 10], replays)


def _seconds_of(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def machine_info() -> dict[str, Any]:
    """The machine that the figures hold on."""
    properties = torch.cuda.get_device_properties(0)
    try:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def copy_ceiling() -> float:
    """Bytes a second, read and written, of a device-to-device copy of 1 GiB.

    Not in a graph: there a copy is a node of its own, which the copy engine runs, on an H200 at 2.7 TB/s;
    the kernel that a stream's copy uses reaches 4.2.
    """
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / time_calls([lambda: target.copy_(source)] * 8, graph=False).median


def bandwidth_row(
    kind: str, size: str, kernel: str, num_bytes: float, took: Timing, ceiling: float
) -> dict[str, Any]:
    """Of a kernel that waits for memory alone: its bandwidth, and the share of `ceiling`, bytes/s."""
    rate = num_bytes / took.median
    return {
        "kind": kind,
        "size": size,
        "kernel": kernel,
        **took.columns(),
        "bytes": num_bytes,
        "TB/s": rate / 1e12,
        "ceiling": rate / ceiling,
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line a row, the first row's keys as columns."""
    if not rows:
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[_shown(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if value and abs(value) < 1e-2 else f"{value:.2f}"
    return str(value)


def result_of(benchmark: str, rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What a benchmark found, with its name and the machine beside it."""
    return {"benchmark": benchmark, "machine": machine_info(), **more, "rows": list(rows)}


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))


def peer_versions() -> dict[str, str]:
    """Of the packages that the peers' kernels come from, as far as they are installed."""
    found = {}
    for package in ("vllm", "flashinfer-python", "flash-attn-3"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
