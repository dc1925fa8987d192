"""Draws what the kernel benchmarks measured: achieved bandwidth against bytes, TFLOP/s against length.

    python benchmarks/plots.py results/attention.json results/layers.json --into docs/plots

Takes the JSON files that the benchmarks write; their own `--plot` does the same at once. SVG, written here:
there is nothing to install.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
OTHER_COLOURS = ("#c0392b", "#d68910", "#7f8c8d", "#17202a")


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
    """A panel for each kind of operation that was measured at three sizes or more, against its bytes."""
    sizes: dict[str, set[float]] = {}
    for row in result["rows"]:
        sizes.setdefault(row["kind"], set()).add(row["bytes"])
    panels = [
        Panel(
            kind,
            "bytes read and written",
            "TB/s",
            _by_kernel((row for row in result["rows"] if row.get("kind") == kind), "kernel", "bytes", "TB/s"),
            result["copy_ceiling"] / 1e12,
            "device-to-device copy",
        )
        for kind in sizes
        if len(sizes[kind]) >= 3
    ]
    return {name: panels}


FIGURES: dict[str, Callable[[Mapping[str, Any]], dict[str, list[Panel]]]] = {
    "paged_attention": attention_figures,
    "layers": lambda result: rate_figures("layers", result),
    "cache": lambda result: rate_figures("cache", result),
}


# ---- drawing ---------------------------------------------------------------------------------------

WIDTH, HEIGHT = 430, 270
"""Of a panel, with its title, legend and axes' labels; pixels."""
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 26, 40


def _draw(path: Path, panels: Sequence[Panel], machine: str) -> None:
    """A file of a few KB that any browser draws and that a review can read."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, rows * HEIGHT + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        lines.append(f'<g transform="translate({i % columns * WIDTH} {i // columns * HEIGHT})">')
        lines += _panel(panel)
        lines.append("</g>")
    lines.append(_text(width - 6, height - 5, machine, anchor="end", colour="gray"))
    path.write_text("\n".join([*lines, "</svg>", ""]))


def draw_bars(path: Path, title: str, bars: Sequence[tuple[str, float]], machine: str) -> None:
    """A horizontal bar for each (name, number)."""
    left, step, full = 370, 22, 300
    width, height = left + full + 70, 34 + step * len(bars) + 14
    highest = max(number for _, number in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(left, 15, title, size=11),
    ]
    for i, (name, number) in enumerate(bars):
        top, length = 26 + step * i, round(full * number / highest, 1)
        lines.append(_text(left - 6, top + 12, name, anchor="end"))
        colour = OTHER_COLOURS[0] if name.startswith("pagedinfer") else OTHER_COLOURS[2]
        lines.append(f'<rect x="{left}" y="{top}" width="{length}" height="{step - 6}" fill="{colour}"/>')
        lines.append(_text(left + length + 5, top + 12, f"{number:,.0f}"))
    lines.append(_text(width - 6, height - 5, machine, anchor="end", colour="gray"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</svg>", ""]))


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for series in panel.series.values() for point in series]
    low, high = (pick(x for x, _ in points) for pick in (min, max))
    low, high = low / 1.3, high * 1.3
    step, top = _scale(max([y for _, y in points] + [panel.ceiling or 0]) * 1.05)

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / low) / math.log(high / low)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM), 1),
        )

    yield _text(LEFT, 15, panel.title, size=11)
    for i in range(round(top / step) + 1):
        _, y = at(low, i * step)
        yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{"black" if i == 0 else "#ddd"}"/>'
        yield _text(LEFT - 4, y + 3, f"{i * step:g}", anchor="end")
    for x, name in _ticks(low, high):
        place, _ = at(x, 0)
        yield f'<path d="M{place} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>'
        yield _text(place, HEIGHT - BOTTOM + 13, name, anchor="middle")
    free = 0.0  # names of places that are near each other stand side by side
    for x, name in sorted(panel.marks.items()):
        free = max(at(x, 0)[0] + 3, free + 9)
        yield _text(free, HEIGHT - BOTTOM - 4, name, size=8, colour="gray", turned=True)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, panel.x_label, anchor="middle")
    yield _text(12, (TOP + HEIGHT - BOTTOM) / 2 + 14, panel.y_label, turned=True)
    if panel.ceiling is not None:
        _, y = at(low, panel.ceiling)
        yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="black" stroke-dasharray="2 3"/>'
        yield _text(LEFT + 4, y - 3, panel.ceiling_name)
    for i, (name, series) in enumerate(panel.series.items()):
        colour = COLOURS.get(name, OTHER_COLOURS[i % len(OTHER_COLOURS)])
        places = [at(x, y) for x, y in series]
        line = " ".join(f"{x},{y}" for x, y in places)
        dashes = "" if name == "ours" else ' stroke-dasharray="5 2"'
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'
        yield f'<g fill="{colour}">'
        for x, y in places:
            yield f'<circle cx="{x}" cy="{y}" r="2"/>'
        yield "</g>"
        yield _text(LEFT + 8, at(low, panel.ceiling or top)[1] + 16 + 12 * i, name, colour=colour)


def _scale(highest: float) -> tuple[float, float]:
    """The distance of the lines across, of which there are four to ten, and the highest one."""
    step = 10.0 ** math.floor(math.log10(highest))
    while highest / step < 4:
        step /= 2
    return step, step * math.ceil(highest / step)


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Places of x with their names: powers of ten, of two if the axis is short."""
    base = 10.0 if high / low > 100 else 2.0
    exponents = range(math.ceil(math.log(low, base)), math.floor(math.log(high, base)) + 1)
    return [(base**e, _short(base**e, 1000 if base == 10 else 1024)) for e in exponents]


def _short(x: float, thousand: int) -> str:
    for unit in ("", "k", "M", "G"):
        if x < thousand:
            return f"{x:g}{unit}"
        x /= thousand
    return f"{x:g}T"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = "black",
    size: int = 10,
    turned: bool = False,
) -> str:
    more = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' fill="{colour}"' if colour != "black" else ""
    more += f' font-size="{size}"' if size != 10 else ""
    return f'<text x="{x:g}" y="{y:g}"{more}>{html.escape(text)}</text>'


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
