"""Draws the curves of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from slurm.groups import Updates, by_difficulty, last_third, shares
from slurm.metrics import Record, accuracy
from slurm.progress import duration

BLUE, ORANGE, GREEN, GREY, PALE = "#2a6fbb", "#d9822b", "#3a8f5c", "#6b7280", "#b9c4d3"


SOURCES = 8
"""As many sources can be told apart by colour."""

LETTERS = 14
"""A longer name in a legend is cut."""

POINTS = 2000
"""About as many points are drawn; more would hide each other."""


@dataclass(frozen=True)
class Recorded:
    """What a run recorded: records in order of step, one of each kind and step; groups of each step; the summary."""

    records: Sequence[Record]
    updates: Updates
    summary: Mapping[str, Any]


def draw(path: Path, run: Recorded) -> None:
    """Write a PNG of the run to `path`."""
    figure = Figure(figsize=(19, 7.8), layout="constrained")
    figure.suptitle(f"{Path(run.summary['run']).name}: {_headline(run.summary)}", fontsize=13, x=0.01, ha="left")
    panels = (_learning, _validation, _budget, _difficulty, _length, _optimisation, _speed, _time)
    for axes, panel in zip(figure.subplots(2, 4).flat, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        panel(axes, run)
        if not axes.has_data() and not axes.texts:
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _headline(summary: Mapping[str, Any]) -> str:
    before, after = (summary["accuracy"].get(moment) for moment in ("before", "after"))
    words = [f"{100 * value:.1f} %" for value in (before, after) if value is not None]
    told = f"validation accuracy {' to '.join(words)}, " if words else ""
    return f"{told}{summary['steps']} steps"


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Exponential moving average over about `span` values, without a pull towards the first one."""
    keep, total, weight = 1 - 2 / (span + 1), 0.0, 0.0
    result = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return result


def _series(records: Sequence[Record], read: str | Callable[[Record], float | None]) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, or of what a function makes of a record, where there is one."""
    steps = [record for record in records if record.kind == "train"]
    found = [(record.step, record.metrics.get(read) if isinstance(read, str) else read(record)) for record in steps]
    pairs = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _line(
    axes: Axes, records: Sequence[Record], read: str | Callable[[Record], float | None], label: str, colour: str
) -> bool:
    """Draw one metric, raw and smoothed; returns whether there was anything to draw."""
    steps, values = _series(records, read)
    if values:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        smooth = smoothed(values, max(3, len(values) // 12))
        axes.plot(steps, smooth, color=colour, linewidth=2, marker=_mark(steps), label=label)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return bool(values)


def _mark(steps: Sequence[int]) -> str:
    """A line through one point cannot be seen."""
    return "o" if len(steps) == 1 else ""


def _second_axis(axes: Axes, label: str, colour: str) -> Axes:
    other: Axes = axes.twinx()
    other.spines["top"].set_visible(False)
    other.set_ylabel(label, color=colour)
    other.tick_params(axis="y", colors=colour)
    return other


def legend_below(axes: Axes, columns: int) -> None:
    """Below the axis, where it can cover nothing."""
    axes.legend(
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
        ncols=columns,
        fontsize=9,
        handlelength=1.6,
        columnspacing=1.2,
    )


def _learning(axes: Axes, run: Recorded) -> None:
    axes.set_title("Learning")
    right = _series(run.records, "accuracy")
    if right != _series(run.records, "reward"):
        _line(axes, run.records, "reward", "training reward", ORANGE)
    _line(axes, run.records, "accuracy", "training accuracy", BLUE)
    rows = {name: row["prompts"] or 0 for name, row in run.summary["accuracy"].get("by_source", {}).items()}
    found = [(record.step, accuracy(record.metrics, rows)) for record in run.records if record.kind == "eval"]
    points = [(step, value) for step, value in found if value is not None]
    if points:
        axes.plot(
            *zip(*points, strict=True), "D--", color=GREEN, markersize=7, linewidth=1, label="validation accuracy"
        )
    if axes.has_data():
        legend_below(axes, 2)


def _validation(axes: Axes, run: Recorded) -> None:
    axes.set_title("Validation accuracy")
    accuracies = run.summary["accuracy"]
    if not accuracies or accuracies["after"] is None:
        return
    rows = {**accuracies["by_source"], "all": accuracies}
    names = list(rows)[::-1]
    for offset, moment, colour in ((0.19, "before", PALE), (-0.19, "after", BLUE)):
        if accuracies[f"{moment}_step"] is None:
            continue
        values = [rows[name][moment] or 0 for name in names]
        places = [index + offset for index in range(len(names))]
        label = f"after step {accuracies[f'{moment}_step']}"
        bars = axes.barh(places, values, height=0.36, color=colour, label=label)
        axes.bar_label(bars, [f"{100 * value:.0f} %" for value in values], padding=3, fontsize=9, color=GREY)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, max(1.0, *(row["after"] for row in rows.values())) * 1.12)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", visible=False)
    legend_below(axes, 2)


def _budget(axes: Axes, run: Recorded) -> None:
    axes.set_title("Where the budget went")
    sources = list(run.summary["budget"].get("by_source", {}))
    if not sources:
        return
    if 1 < len(sources) <= SOURCES and len(run.updates) > 1:
        _shares(axes, run.updates, sources)
    else:
        _counts(axes, run.updates)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _shares(axes: Axes, updates: Updates, sources: Sequence[str]) -> None:
    """Areas of the samples of each source, and as dashes where their borders were if all prompts got equally many."""
    steps, span = list(updates), max(3, len(updates) // 6)
    samples, prompts = (
        [smoothed(series, span) for series in shares(updates, sources, of)]
        for of in (lambda group: group.count, lambda group: 1)
    )
    colours = colormaps["viridis"]([0.15 + 0.75 * place / (len(sources) - 1) for place in range(len(sources))])
    names = [source if len(source) <= LETTERS else f"{source[: LETTERS - 1]}…" for source in sources]
    axes.stackplot(steps, samples, labels=names, colors=colours, alpha=0.85, linewidth=0)
    for border in list(accumulate(prompts, lambda below, series: list(map(add, below, series))))[:-1]:
        axes.plot(steps, border, "--", color="white", linewidth=1)
    axes.set_ylabel("share of samples (dashed: if equal)")
    axes.margins(x=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_below(axes, 4 if max(map(len, names)) <= 8 else 3)


def _counts(axes: Axes, updates: Updates) -> None:
    """Mean and range of the samples that the prompts of a step got."""
    steps, counts = list(updates), [[group.count for group in groups] for groups in updates.values()]
    axes.fill_between(
        steps, list(map(min, counts)), list(map(max, counts)), color=PALE, alpha=0.5, linewidth=0, label="range"
    )
    axes.plot(
        steps, [sum(step) / len(step) for step in counts], color=BLUE, linewidth=2, marker=_mark(steps), label="mean"
    )
    axes.set_ylabel("samples of a prompt")
    axes.set_ylim(0, 1.08 * max(map(max, counts)))
    legend_below(axes, 2)


def _difficulty(axes: Axes, run: Recorded) -> None:
    axes.set_title("Samples by difficulty")
    groups = last_third(run.updates)
    known = [(group.share_right, group.count) for group in groups if group.share_right is not None]
    if groups and not known:
        axes.text(0.5, 0.5, "no prompt had a history", transform=axes.transAxes, ha="center", color=GREY)
    if not known:
        return
    bins = list(by_difficulty(groups))
    places = [each.share_right for each in bins]
    axes.plot(*zip(*known[:: max(1, len(known) // POINTS)], strict=True), ".", color=PALE, markersize=4, zorder=1)
    band = [each.low for each in bins], [each.high for each in bins]
    axes.fill_between(places, *band, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(
        places, [each.mean for each in bins], "o-", color=BLUE, markersize=4, linewidth=2, label="mean, 80 % band"
    )
    uniform = sum(group.count for group in groups) / len(groups)
    axes.axhline(uniform, color=GREY, linestyle="--", linewidth=1, label=f"if equal: {uniform:.3g}")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(0, 1.08 * max(count for _, count in known))
    axes.set_xlabel("right among a prompt's earlier samples")
    axes.set_ylabel("samples, last third of the steps")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    legend_below(axes, 2)


def _length(axes: Axes, run: Recorded) -> None:
    axes.set_title("Response length")
    if not _line(axes, run.records, "rollout/response_length_mean", "tokens", BLUE):
        return
    axes.set_ylabel("tokens", color=BLUE)
    _, cut = _series(run.records, "rollout/truncated_rate")
    if any(cut):
        other = _second_axis(axes, "cut off", ORANGE)
        _line(other, run.records, "rollout/truncated_rate", "cut off", ORANGE)
        other.yaxis.set_major_formatter(PercentFormatter(1.0))


def _optimisation(axes: Axes, run: Recorded) -> None:
    axes.set_title("Optimisation")
    if _line(axes, run.records, "actor_grad_norm", "gradient norm", BLUE):
        axes.set_ylabel("gradient norm", color=BLUE)
    second = next(
        (key for key in ("entropy", "entropy_loss", "kl", "group_reward_std") if any(_series(run.records, key)[1])),
        None,
    )
    if second:
        other = _second_axis(axes, second.replace("_", " "), ORANGE)
        _line(other, run.records, second, second, ORANGE)


def _speed(axes: Axes, run: Recorded) -> None:
    axes.set_title("Speed")
    if _line(axes, run.records, lambda record: record.tokens_per_second, "tokens/s", BLUE):
        axes.set_ylabel("response tokens per second", color=BLUE)
        axes.set_ylim(bottom=0)
    if _series(run.records, "timing/step_total")[1]:
        other = _second_axis(axes, "seconds per step", ORANGE)
        _line(other, run.records, "timing/step_total", "s", ORANGE)
        other.set_ylim(bottom=0)


def _time(axes: Axes, run: Recorded) -> None:
    axes.set_title(f"Time: {duration(run.summary['seconds'])} in all")
    phases = run.summary["seconds_by_phase"]
    if not phases:
        return
    bars = axes.barh(list(phases)[::-1], list(phases.values())[::-1], height=0.6, color=BLUE)
    words = [
        f"{duration(seconds)}  {100 * seconds / run.summary['seconds']:.0f} %"
        for seconds in list(phases.values())[::-1]
    ]
    axes.bar_label(bars, words, padding=4, fontsize=9, color=GREY)
    axes.set_xlim(0, max(phases.values()) * 1.3)
    axes.set_xlabel("seconds")
    axes.grid(axis="y", visible=False)
