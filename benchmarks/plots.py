"""Draws what the kernel benchmarks measured: achieved bandwidth against bytes, TFLOP/s against length.

    python benchmarks/plots.py results/attention.json results/layers.json --into docs/plots

Takes the JSON files that the benchmarks write, so that the machine with the GPU needs no matplotlib; their
own `--plot` does the same at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One diagram; x is logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    """By who was measured."""
    ceiling: float | None = None
    """Of y: a line across."""
    ceiling_name: str = ""
    marks: Mapping[float, str] = field(default_factory=dict)
    """What some places of x are called."""


COLOURS = {
    "ours": "#c0392b",
    "fa3": "#2471a3",
    "flashinfer": "#1e8449",
    "vllm": "#7d3c98",
    "torch": "#7f8c8d",
}


def plot_result(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws the figures of one benchmark's JSON into `folder`; returns the files.

    Raises:
        ValueError: a benchmark that has no figures.
    """
    figures = FIGURES.get(result.get("benchmark", ""))
    if figures is None:
        raise ValueError(f"no figures for benchmark {result.get('benchmark')!r}; there are {sorted(FIGURES)}")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, panels in figures(result).items():
        if panels:
            path = folder / f"{name}.svg"
            _draw(path, panels, f"{result['machine']['gpu']}, torch {result['machine']['torch']}")
            made.append(path)
    return made


# ---- what there is to draw -------------------------------------------------------------------------


def _by_kernel(rows: Iterable[Mapping[str, Any]], key: str, x: str, y: str) -> dict[str, Points]:
    series: dict[str, Points] = {}
    for row in rows:
        if row.get(x) is not None and row.get(y) is not None:
            series.setdefault(row[key], []).append((row[x], row[y]))
    return {name: sorted(points) for name, points in series.items()}


def attention_figures(result: Mapping[str, Any]) -> dict[str, list[Panel]]:
    rows = [row for row in result["rows"] if row["kernel"] != "plan" and row["shape"] == result["shape"]]
    decode = [row for row in rows if row["grid"] == "decode"]
    prompts = [row for row in rows if row["grid"] == "prefill" and row["num_seqs"] == 1]
    shape = "{} query / {} KV heads of {}, blocks of {}".format(*result["shape"].split("/"))
    panels: dict[str, list[Panel]] = {"decode": [], "prefill": []}
    if decode:
        panels["decode"].append(
            Panel(
                f"Decode attention, {shape}",
                "bytes of K and V",
                "TB/s",
                _by_kernel(decode, "kernel", "bytes", "TB/s"),
                result["copy_ceiling"] / 1e12,
                "device-to-device copy",
                {row["bytes"]: row["batch"] for row in decode},
            )
        )
    if prompts:
        panels["prefill"].append(
            Panel(
                f"Causal prefill of one prompt, {shape}",
                "tokens",
                "TFLOP/s",
                _by_kernel(prompts, "kernel", "tokens", "TFLOP/s"),
                result.get("gemm_ceiling", 0) / 1e12 or None,
                "GEMM 8192^3",
            )
        )
    return panels


def rate_figures(name: str, result: Mapping[str, Any]) -> dict[str, list[Panel]]:
    """A panel for each kind of operation, each against its bytes."""
    kinds = dict.fromkeys(row["kind"] for row in result["rows"] if "kind" in row)
    panels = [
        Panel(
            kind,
            "bytes read and written",
            "TB/s",
            _by_kernel((row for row in result["rows"] if row.get("kind") == kind), "kernel", "bytes", "TB/s"),
            result["copy_ceiling"] / 1e12,
            "device-to-device copy",
        )
        for kind in kinds
    ]
    return {name: panels}


FIGURES = {
    "paged_attention": attention_figures,
    "layers": lambda result: rate_figures("layers", result),
    "cache": lambda result: rate_figures("cache", result),
}


# ---- drawing ---------------------------------------------------------------------------------------


def _draw(path: Path, panels: Sequence[Panel], machine: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.size": 9})
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.6 * columns if len(panels) > 1 else 7.5, 3.2 * rows if len(panels) > 1 else 4.0)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, points in panel.series.items():
            colour = COLOURS.get(name.partition(",")[0])
            style = "-" if name == "ours" else "--"
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name, color=colour)
        if panel.ceiling is not None:
            axis.axhline(panel.ceiling, color="black", linewidth=0.8, linestyle=":")
            axis.text(
                0.01, panel.ceiling, panel.ceiling_name, transform=axis.get_yaxis_transform(), va="bottom"
            )
        for x, name in panel.marks.items():
            axis.annotate(name, (x, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=6)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.text(0.995, 0.005, machine, ha="right", fontsize=6, color="gray")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of the benchmarks")
    parser.add_argument("--into", type=Path, default=Path("plots"), help="folder for the figures")
    args = parser.parse_args()
    for path in args.results:
        try:
            made = plot_result(json.loads(path.read_text()), args.into)
        except ValueError as problem:
            raise SystemExit(f"{path}: {problem}") from None
        print(*made, sep="\n", file=sys.stdout)


if __name__ == "__main__":
    main()
