"""Draws the curves of a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from slurm.metrics import Record, accuracy
from slurm.progress import duration

BLUE, ORANGE, GREEN, GREY, PALE = "#2a6fbb", "#d9822b", "#3a8f5c", "#6b7280", "#b9c4d3"


def draw(path: Path, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    """Write a PNG of the run to `path`; `records` are in order of step, one of each kind and step."""
    figure = Figure(figsize=(14, 7.6), layout="constrained")
    figure.suptitle(f"{Path(summary['run']).name}: {_headline(summary)}", fontsize=13, x=0.01, ha="left")
    panels = (_learning, _validation, _length, _optimisation, _speed, _time)
    for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        panel(axes, records, summary)
        if not axes.has_data():
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
        axes.plot(steps, smoothed(values, max(3, len(values) // 12)), color=colour, linewidth=2, label=label)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return bool(values)


def _second_axis(axes: Axes, label: str, colour: str) -> Axes:
    other: Axes = axes.twinx()
    other.spines["top"].set_visible(False)
    other.set_ylabel(label, color=colour)
    other.tick_params(axis="y", colors=colour)
    return other


def _learning(axes: Axes, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    axes.set_title("Learning")
    right = _series(records, "accuracy")
    if right != _series(records, "reward"):
        _line(axes, records, "reward", "training reward", ORANGE)
    _line(axes, records, "accuracy", "training accuracy", BLUE)
    rows = {name: row["prompts"] or 0 for name, row in summary["accuracy"].get("by_source", {}).items()}
    found = [(record.step, accuracy(record.metrics, rows)) for record in records if record.kind == "eval"]
    points = [(step, value) for step, value in found if value is not None]
    if points:
        axes.plot(
            *zip(*points, strict=True), "D--", color=GREEN, markersize=7, linewidth=1, label="validation accuracy"
        )
    if axes.has_data():
        axes.legend(frameon=False)


def _validation(axes: Axes, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    axes.set_title("Validation accuracy")
    accuracies = summary["accuracy"]
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
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2)


def _length(axes: Axes, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    axes.set_title("Response length")
    if not _line(axes, records, "rollout/response_length_mean", "tokens", BLUE):
        return
    axes.set_ylabel("tokens", color=BLUE)
    _, cut = _series(records, "rollout/truncated_rate")
    if any(cut):
        other = _second_axis(axes, "cut off", ORANGE)
        _line(other, records, "rollout/truncated_rate", "cut off", ORANGE)
        other.yaxis.set_major_formatter(PercentFormatter(1.0))


def _optimisation(axes: Axes, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    axes.set_title("Optimisation")
    if _line(axes, records, "actor_grad_norm", "gradient norm", BLUE):
        axes.set_ylabel("gradient norm", color=BLUE)
    second = next(
        (key for key in ("entropy", "entropy_loss", "kl", "group_reward_std") if any(_series(records, key)[1])), None
    )
    if second:
        other = _second_axis(axes, second.replace("_", " "), ORANGE)
        _line(other, records, second, second, ORANGE)


def _speed(axes: Axes, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    axes.set_title("Speed")
    if _line(axes, records, lambda record: record.tokens_per_second, "tokens/s", BLUE):
        axes.set_ylabel("response tokens per second", color=BLUE)
        axes.set_ylim(bottom=0)
    if _series(records, "timing/step_total")[1]:
        other = _second_axis(axes, "seconds per step", ORANGE)
        _line(other, records, "timing/step_total", "s", ORANGE)
        other.set_ylim(bottom=0)


def _time(axes: Axes, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    axes.set_title(f"Time: {duration(summary['seconds'])} in all")
    phases = summary["seconds_by_phase"]
    if not phases:
        return
    bars = axes.barh(list(phases)[::-1], list(phases.values())[::-1], height=0.6, color=BLUE)
    words = [
        f"{duration(seconds)}  {100 * seconds / summary['seconds']:.0f} %" for seconds in list(phases.values())[::-1]
    ]
    axes.bar_label(bars, words, padding=4, fontsize=9, color=GREY)
    axes.set_xlim(0, max(phases.values()) * 1.3)
    axes.set_xlabel("seconds")
    axes.grid(axis="y", visible=False)
