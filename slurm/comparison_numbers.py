"""A comparison of runs in numbers: accuracy against samples, means over seeds, and differences in pairs of seeds."""

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from slurm.compared_runs import Run, differing, samples_at
from slurm.config import shown
from slurm.report import convergence

MEASURED = (
    "eval.dataset (contents)",
    "eval.n_samples_per_prompt",
    "eval.split",
    "eval.temperature",
    "rollout.max_new_tokens",
    "rollout.top_p",
)
"""What must be equal for accuracies to be comparable."""

COUNTS = 8
"""At most as many sample counts are told in a table."""

FEWEST = 3
"""Of fewer values a standard error says little: a band shows their range then, and no difference is judged."""

Curve = Sequence[tuple[float, float]]
"""Samples so far and accuracy, 0 to 1, of each evaluation of a run, in order."""


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison in numbers: accuracies from 0 to 1, gains and differences in percentage points."""
    generated = all(run.generated is not None for run in runs)
    curves = [curve_of(run, generated) for run in runs]
    low, high = common_range(curves)
    counts = common_counts(curves, low, high)
    told = [_told(run, curve, (low, high), counts, generated) for run, curve in zip(runs, curves, strict=True)]
    names = list(dict.fromkeys(run.group for run in runs))
    return {
        "samples_are": "generated" if generated else "learnt",
        "range": [low, high] if low < high else None,
        "counts": counts,
        "runs": told,
        "groups": {name: _group([one for one in told if one["group"] == name]) for name in names},
        "difference": _difference(names[0], names[1], told) if len(names) == 2 else None,
        "notes": list(_notes(runs, curves, generated)),
    }


def _samples(run: Run, generated: bool, step: int) -> int:
    known = run.generated if generated and run.generated is not None else run.learnt
    return samples_at(known, step)


def curve_of(run: Run, generated: bool) -> Curve:
    return [(_samples(run, generated, step), value) for step, value in sorted(run.accuracies.items())]


def common_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The samples over which every run with more than one evaluation was followed; none if the first is not less."""
    lines = [curve for curve in curves if len(curve) > 1]
    if not lines:
        return 0, 0
    return max(curve[0][0] for curve in lines), min(curve[-1][0] for curve in lines)


def common_counts(curves: Sequence[Curve], low: float, high: float) -> list[float]:
    """Up to `COUNTS` sample counts in the common range: where the run with the fewest evaluations in it has them."""
    if low >= high:
        return []
    inside = [sorted({low, high, *(x for x, _ in curve if low <= x <= high)}) for curve in curves if len(curve) > 1]
    _, found = min((len(counts), counts) for counts in inside)
    last = len(found) - 1
    wanted = min(COUNTS, len(found))
    return [found[round(place * last / (wanted - 1))] for place in range(wanted)]


def accuracy_at(curve: Curve, samples: float) -> float | None:
    """The accuracy at a sample count, on the straight line between evaluations; None outside of them."""
    place = bisect_right([x for x, _ in curve], samples)
    if place == 0 or (place == len(curve) and curve[-1][0] < samples):
        return None
    (x, value), (next_x, next_value) = curve[place - 1], curve[min(place, len(curve) - 1)]
    return value if x == samples else value + (next_value - value) * (samples - x) / (next_x - x)


def mean_over_samples(curve: Curve, low: float, high: float) -> float | None:
    """The area under the curve from `low` to `high` samples, by trapezoids, over its width."""
    ends = accuracy_at(curve, low), accuracy_at(curve, high)
    if low >= high or ends[0] is None or ends[1] is None:
        return None
    inside = [(x, value) for x, value in curve if low < x < high]
    points = [(low, ends[0]), *inside, (high, ends[1])]
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points)) / (high - low)


def _told(
    run: Run, curve: Curve, common: tuple[float, float], counts: Sequence[float], generated: bool
) -> dict[str, Any]:
    steps = sorted(run.accuracies)
    before, after = curve[0][1] if len(curve) > 1 else None, curve[-1][1]
    return {
        "run": str(run.folder),
        "group": run.group,
        "seed": run.seed,
        "samples": curve[-1][0],
        "samples_learnt": samples_at(run.learnt, steps[-1]),
        "samples_generated": None if run.generated is None else samples_at(run.generated, steps[-1]),
        "before": before,
        "after": after,
        "gain_points": None if before is None else 100 * (after - before),
        "area": mean_over_samples(curve, *common),
        "convergence": convergence(run.accuracies),
        "at": [accuracy_at(curve, count) for count in counts],
        "curve": [[step, samples, value] for step, (samples, value) in zip(steps, curve, strict=True)],
        "effective": [[step, _samples(run, generated, step), share] for step, share in run.effective.items()],
    }


def statistic(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean of the known values, its standard error (None for fewer than two), and how many they are."""
    known = [value for value in values if value is not None]
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"mean": statistics.fmean(known) if known else None, "error": error, "runs": len(known)}


def _group(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("samples", "before", "after", "gain_points", "area")
    return {
        "seeds": [one["seed"] for one in told],
        **{name: statistic([one[name] for one in told]) for name in names},
        "convergence": _converged([one["convergence"] for one in told]),
        "at": [statistic(values) for values in zip(*(one["at"] for one in told), strict=True)],
        "band": "standard error" if len(told) >= FEWEST else "range" if len(told) > 1 else None,
        "curve": _mean_curve([one["curve"] for one in told]),
        "effective": _mean_curve([one["effective"] for one in told if one["effective"]]),
    }


def _converged(told: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Steps of those runs that converged, and `of` how many that were evaluated often enough; None if none was."""
    known = [one["step"] for one in told if one]
    return statistic(known) | {"of": len(known)} if known else None


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[dict[str, float]]:
    """Means of samples and values over curves of (step, samples, value), at the steps that all of them have, and the
    band around the value: its standard error, or the range of fewer than three."""
    rows = [{step: (samples, value) for step, samples, value in curve} for curve in curves]
    found = []
    for step in sorted(set.intersection(*map(set, rows))) if rows else []:
        samples, values = zip(*(row[step] for row in rows), strict=True)
        mean, error = statistics.fmean(values), statistic(values)["error"] or 0.0
        low, high = (mean - error, mean + error) if len(values) >= FEWEST else (min(values), max(values))
        found.append(
            {"step": step, "samples": statistics.fmean(samples), "mean": mean, "low": low, "high": high},
        )
    return found


def _difference(first: str, second: str, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """First group less second, seed by seed, over the seeds that both have; in percentage points."""
    pairs = _pairs(first, second, told)
    reads: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "accuracy after": lambda run: run["after"],
        "accuracy at the most samples that all runs have": lambda run: run["at"][-1] if run["at"] else None,
        "area": lambda run: run["area"],
    }
    found = {}
    for name, read in reads.items():
        values = {seed: (read(one), read(other)) for seed, (one, other) in pairs.items()}
        points = {seed: 100 * (a - b) for seed, (a, b) in values.items() if a is not None and b is not None}
        found[name] = {
            **statistic(list(points.values())),
            "by_seed": points,
            "first_higher": sum(value > 0 for value in points.values()),
            "second_higher": sum(value < 0 for value in points.values()),
        }
    return {"groups": [first, second], "seeds": list(pairs), "points": found}


def _pairs(
    first: str, second: str, told: Sequence[Mapping[str, Any]]
) -> dict[int, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The runs of each seed that both groups have, in order of seed."""
    by_seed = {name: {one["seed"]: one for one in told if one["group"] == name} for name in (first, second)}
    common = sorted(by_seed[first].keys() & by_seed[second].keys())
    return {seed: (by_seed[first][seed], by_seed[second][seed]) for seed in common}


def _notes(runs: Sequence[Run], curves: Sequence[Curve], generated: bool) -> Iterator[str]:
    """What a reader must know before trusting the numbers."""
    for name in dict.fromkeys(run.group for run in runs):
        members = [run for run in runs if run.group == name]
        for key, values in differing(members).items():
            pairs = ", ".join(f"{value} (seed {run.seed})" for run, value in zip(members, values, strict=True))
            yield f"the runs of {name} differ in more than the seed: {key}: {pairs}"
    measured = [key for key in differing(runs) if key in MEASURED]
    if measured:
        yield f"accuracies were not measured alike: the runs differ in {', '.join(measured)}"
    if not generated:
        unknown = ", ".join(shown(run.folder) for run in runs if run.generated is None)
        yield f"how many samples were generated, with those of filtered prompts, is not known of {unknown}"
    used = [curve[-1][0] for curve in curves]
    if min(used) < max(used):
        yield f"the last accuracies belong to {min(used):.0f} to {max(used):.0f} samples: see those at equal samples"
    first = {curve[0][0] for curve in curves if len(curve) > 1}
    if first - {0}:
        yield f"`before` is the first evaluation, which came after up to {max(first):.0f} samples"
    single = [shown(run.folder) for run, curve in zip(runs, curves, strict=True) if len(curve) == 1]
    if single:
        yield f"evaluated once only, and so without accuracy before, gain and area: {', '.join(single)}"
