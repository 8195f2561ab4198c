"""Runs beside each other: validation accuracy against the samples that it took, in words that claim no more than the
seeds bear out."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm.compared_runs import read_runs
from slurm.comparison_numbers import FEWEST, compare
from slurm.problems import UserError
from slurm.report import EVALUATIONS
from slurm.run_folder import new_folder, write_json

BASIS = {"generated": "generated ones, those of filtered prompts included", "learnt": "those learnt from"}


def write_comparison(paths: Sequence[Path], output: Path | None = None) -> tuple[str, dict[str, str]]:
    """Compare the runs at `paths` in a new folder: comparison.png, .json and .md; next to the first run by default.

    Returns the Markdown, and by folder why runs were left out. Raises UserError if none is left or `output` exists.
    """
    from slurm.comparison_plot import draw  # matplotlib takes a second to import, which no other command should pay

    if output and output.exists():
        raise UserError(f"--output {output}: is there already, and nothing is overwritten; give a new folder")
    runs, left_out = read_runs(paths)
    if not runs:
        reasons = (f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError("\n".join(("none of these runs can be compared:", *reasons)))
    if output:
        output.mkdir(parents=True)
    folder = output or new_folder(runs[0].folder.parent, f"comparison-{time.strftime('%Y%m%d-%H%M%S')}")
    summary = compare(runs) | {"left_out": left_out, "image": str(folder.resolve() / "comparison.png")}
    write_json(folder / "comparison.json", summary)
    draw(folder / "comparison.png", summary)
    text = as_markdown(summary)
    (folder / "comparison.md").write_text(text, encoding="utf-8")
    return text, left_out


def as_markdown(summary: Mapping[str, Any]) -> str:
    """The comparison as Markdown; see `slurm.comparison_numbers.compare` for `summary`."""
    runs, groups = summary["runs"], summary["groups"]
    lines = [f"# {_many(len(runs), 'run')} in {_many(len(groups), 'group')}", "", *_table(summary), ""]
    if summary["counts"]:
        lines += [*_equal_samples(summary), ""]
    if summary["difference"]:
        lines += [*_paired(summary), ""]
    if summary["notes"]:
        lines += ["Note:", "", *(f"- {note}" for note in summary["notes"]), ""]
    if summary["left_out"]:
        lines += ["Left out:", "", *(f"- {name}: {reason}" for name, reason in summary["left_out"].items()), ""]
    lines += [f"- {one['group']}, seed {one['seed']}: {one['run']}" for one in runs]
    return "\n".join([*lines, f"- plot: {summary['image']}"]) + "\n"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _seeds(seeds: list[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _table(summary: Mapping[str, Any]) -> Iterator[str]:
    converged = any(row["convergence"] for row in summary["groups"].values())
    heads = ["group", "seeds", "samples", "accuracy before", "after", "gain, points", "area"]
    yield f"| {' | '.join(heads + ['converged at step'] * converged)} |"
    yield "|---|---|" + "--:|" * (5 + converged)
    for name, row in summary["groups"].items():
        shares = [_share(row[key], len(row["seeds"])) for key in ("before", "after")]
        cells = [name, _seeds(row["seeds"]), f"{row['samples']['mean']:.0f}", *shares]
        cells += [_points(row["gain_points"]), _share(row["area"], len(row["seeds"]))]
        yield f"| {' | '.join(cells + [_steps(row['convergence'])] * converged)} |"
    yield ""
    told = f"Samples: {BASIS[summary['samples_are']]}, up to the last evaluation. ± is the standard error over seeds."
    if summary["range"]:
        low, high = summary["range"]
        told += f" Area: mean accuracy from {low:.0f} to {high:.0f} samples, which all runs have in common."
    if converged:
        told += (
            f" Converged: the mean of those runs that did, and how many of those with {EVALUATIONS} evaluations or "
            "more; the rule finds nothing in the last sixth of a run."
        )
    yield told


def _equal_samples(summary: Mapping[str, Any]) -> Iterator[str]:
    yield f"| accuracy after samples | {' | '.join(summary['groups'])} |"
    yield "|--:|" + "--:|" * len(summary["groups"])
    for place, count in enumerate(summary["counts"]):
        cells = [_share(row["at"][place], len(row["seeds"])) for row in summary["groups"].values()]
        yield f"| {count:.0f} | {' | '.join(cells)} |"
    measured = [{samples for _, samples, _ in one["curve"]} for one in summary["runs"] if len(one["curve"]) > 1]
    if any(not set(summary["counts"]) <= counts for counts in measured):
        yield ""
        yield "Where a run was not evaluated at a count, its accuracy there is on the line between its evaluations."


def _share(value: Mapping[str, Any], runs: int) -> str:
    """Mean and error in percent, and of how many runs where it is not of all."""
    if value["mean"] is None:
        return ""
    error = "" if value["error"] is None else f" ± {100 * value['error']:.1f}"
    return f"{100 * value['mean']:.1f}{error} %" + (f" ({value['runs']} of {runs})" if value["runs"] < runs else "")


def _points(value: Mapping[str, Any]) -> str:
    if value["mean"] is None:
        return ""
    return f"{value['mean']:+.1f}" + ("" if value["error"] is None else f" ± {value['error']:.1f}")


def _steps(value: Mapping[str, Any] | None) -> str:
    """Mean step and error of the runs that converged, and how many of how many did."""
    if value is None:
        return ""
    error = "" if value["error"] is None else f" ± {value['error']:.0f}"
    mean = "" if value["mean"] is None else f"{value['mean']:.0f}{error} "
    return f"{mean}({value['runs']} of {value['of']})"


def _paired(summary: Mapping[str, Any]) -> Iterator[str]:
    difference = summary["difference"]
    first, second = difference["groups"]
    if not difference["seeds"]:
        yield f"{first} and {second} have no seed in common: there are no pairs to compare."
        return
    yield f"{first} less {second}, in pairs of equal seed ({_seeds(difference['seeds'])}):"
    yield ""
    used = {one["samples"] for one in summary["runs"]}
    for name, value in difference["points"].items():
        # Where all runs used equally many samples, both are the same number.
        if value["mean"] is None or (name.endswith("have") and len(used) == 1):
            continue
        higher = f"{first} is higher with {value['first_higher']} of {_many(value['runs'], 'seed')}"
        lower = f"{second} with {value['second_higher']}"
        yield f"- {name}: {_points(value)} points; {higher}, {lower}. {verdict(value, first, second)}"


def verdict(value: Mapping[str, Any], first: str, second: str) -> str:
    """What a paired difference says: a group is called better only beyond two standard errors of enough seeds."""
    mean, error, seeds = value["mean"], value["error"], value["runs"]
    if error is None:
        return "One pair says nothing about the noise."
    if abs(mean) <= 2 * error or mean == 0:
        return f"The difference lies within the noise of {seeds} seeds (two standard errors: {2 * error:.1f})."
    if seeds < FEWEST:
        return f"It exceeds two standard errors ({2 * error:.1f}), which {seeds} seeds do not tell reliably."
    return f"It exceeds two standard errors ({2 * error:.1f}): {first if mean > 0 else second} is better here."
