"""Draws a comparison: accuracy and teaching samples against samples used, and last accuracies seed by seed."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from slurm.plot import GREY, legend_below, smoothed

SAMPLES = {"generated": "training samples generated", "learnt": "training samples learnt from"}
MARKS = "osD^vPX"
COLOURS = colormaps["tab10"]
NAMES = 3
"""More groups are told by colour and mark alone: their names would run into each other below an axis."""

Summary = Mapping[str, Any]


def draw(path: Path, summary: Summary) -> None:
    """Write a PNG of a comparison (see `slurm.comparison_numbers.compare`) to `path`."""
    paired = bool(summary["difference"] and summary["difference"]["seeds"])
    panels: list[tuple[float, Callable[[Axes, Summary], None]]] = [(1.5, _curves), (1, _last), (1.5, _effective)]
    if paired:
        panels.insert(2, (1, _pairs))
    figure = Figure(figsize=(4 * sum(width for width, _ in panels), 6), layout="constrained")
    widths = [width for width, _ in panels]
    for axes, (_, panel) in zip(figure.subplots(1, len(panels), width_ratios=widths), panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        panel(axes, summary)
    figure.savefig(path, dpi=110)


def _styles(summary: Summary) -> dict[str, dict[str, Any]]:
    """Colour and mark of each group."""
    return {
        name: {"color": COLOURS(place % COLOURS.N), "marker": MARKS[place % len(MARKS)]}
        for place, name in enumerate(summary["groups"])
    }


def _against_samples(axes: Axes, summary: Summary) -> None:
    axes.set_xlabel(SAMPLES[summary["samples_are"]])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=-0.03 * max(one["samples"] for one in summary["runs"]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if axes.get_legend_handles_labels()[1]:
        legend_below(axes, 1)


def _curves(axes: Axes, summary: Summary) -> None:
    axes.set_title("Validation accuracy")
    for name, style in _styles(summary).items():
        group = summary["groups"][name]
        for one in summary["runs"]:
            if one["group"] == name:
                _, samples, values = zip(*one["curve"], strict=True)
                axes.plot(samples, values, ".-", color=style["color"], alpha=0.4, linewidth=0.8, markersize=4)
        axes.plot(*_means(group["curve"]), **style, linewidth=2, markersize=6, label=_label(name, group))
        if group["band"]:
            _band(axes, group["curve"], style["color"])
    _against_samples(axes, summary)


def _means(curve: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    return [point["samples"] for point in curve], [point["mean"] for point in curve]


def _band(axes: Axes, curve: Sequence[Mapping[str, float]], colour: Any) -> None:
    low, high = [point["low"] for point in curve], [point["high"] for point in curve]
    axes.fill_between([point["samples"] for point in curve], low, high, color=colour, alpha=0.18, linewidth=0)


def _label(name: str, group: Mapping[str, Any]) -> str:
    seeds = len(group["seeds"])
    return f"{name}: mean of {seeds} seeds, band: {group['band']}" if group["band"] else f"{name}: one seed"


def _last(axes: Axes, summary: Summary) -> None:
    axes.set_title("Accuracy at the last evaluation")
    for place, (name, style) in enumerate(_styles(summary).items()):
        values = [one["after"] for one in summary["runs"] if one["group"] == name]
        group = summary["groups"][name]["after"]
        axes.plot(
            _spread(place, len(values)), values, style["marker"], color=style["color"], alpha=0.7, linestyle="none"
        )
        axes.hlines(group["mean"], place - 0.3, place + 0.3, color=style["color"], linewidth=2)
    if len(summary["groups"]) <= NAMES:
        axes.set_xticks(range(len(summary["groups"])), [textwrap.fill(name, 14) for name in summary["groups"]])
    else:
        axes.set_xticks([])
    axes.set_xlim(-0.6, len(summary["groups"]) - 0.4)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("a point a seed, a line their mean")


def _spread(centre: float, count: int) -> list[float]:
    """Places beside each other, so that equal values can be seen."""
    return [centre + 0.4 * (place / (count - 1) - 0.5) if count > 1 else centre for place in range(count)]


def _pairs(axes: Axes, summary: Summary) -> None:
    first, second = summary["difference"]["groups"]
    axes.set_title("Pairs of equal seed")
    value = summary["difference"]["points"]["accuracy after"]
    seeds = list(value["by_seed"])
    axes.axhline(0, color="black", linewidth=1)
    axes.plot(range(len(seeds)), list(value["by_seed"].values()), "o", color=GREY, label="at the last evaluation")
    axes.axhline(value["mean"], color=GREY, linewidth=2, label="mean")
    if value["error"] is not None:
        low, high = value["mean"] - value["error"], value["mean"] + value["error"]
        axes.axhspan(low, high, color=GREY, alpha=0.18, linewidth=0, label="± standard error")
    axes.set_xticks(range(len(seeds)), [str(seed) for seed in seeds])
    axes.set_xlim(-0.6, len(seeds) - 0.4)
    axes.set_xlabel("seed")
    axes.set_ylabel(textwrap.fill(f"{first} less {second}, points", 48))
    axes.grid(axis="x", visible=False)
    legend_below(axes, 1)


def _effective(axes: Axes, summary: Summary) -> None:
    axes.set_title("Samples that taught something")
    for name, style in _styles(summary).items():
        for one in summary["runs"]:
            if one["group"] == name and one["effective"]:
                _, samples, values = zip(*one["effective"], strict=True)
                axes.plot(samples, _smooth(values), color=style["color"], alpha=0.3, linewidth=0.8)
        curve = summary["groups"][name]["effective"]
        if curve:
            places, means = _means(curve)
            axes.plot(places, _smooth(means), color=style["color"], linewidth=2, label=f"{name}: smoothed mean")
    if axes.has_data():
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of the samples learnt from")
    else:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)
    _against_samples(axes, summary)


def _smooth(values: Sequence[float]) -> list[float]:
    return smoothed(values, max(3, len(values) // 12))
