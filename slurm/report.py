"""What came of a run: accuracy before and after, where the time went, and the curves."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slurm.groups import Updates, budget, read_updates
from slurm.metrics import Record, accuracy, accuracy_by_source, last_of_each_step, read_records
from slurm.progress import duration
from slurm.run_folder import RunFolder, read_json, write_json

PHASES = {
    "timing/generation": "generation",
    "timing/make_experience": "experience",
    "timing/ppo_train": "training",
    "timing/broadcast": "weight sync",
    "timing/evaluation": "evaluation",
}
"""Timed parts of a training step or an evaluation, and the phase that each is."""

SHARPNESS = {
    "groups/sharpness": "κ, (A⁺ − A⁻)/β of a group",
    "groups/advantage_gap": "A⁺ − A⁻ of a group",
    "policy/effective_sharpness": "κ_eff, what an update adds to log π(a⁺) − log π(a⁻)",
}
"""Metrics of how far right and wrong samples are parted, told as means over the steps that have them."""

POLICY = {
    "policy/entropy": "entropy, nats",
    "policy/aligned": "tokens that are the mode",
    "policy/uncertainty": "1 − probability of the mode",
}
"""Metrics of the policy at its tokens, told of the first and the last step."""

EVALUATIONS = 12
"""Of fewer, the polynomial of the convergence rule (six coefficients) would follow the noise of each."""

ORDER = ("start-up", *PHASES.values(), "other")


def write_report(run: RunFolder) -> dict[str, Any]:
    """Write report/ of a run anew from its metrics, and return the summary."""
    from slurm.plot import Recorded, draw  # matplotlib takes a second to import, which no other command should pay

    records, updates = read_records(run.metrics), read_updates(run.updates)
    summary = summarize(run, records, updates)
    write_json(run.summary_json, summary)
    draw(run.curves, Recorded(last_of_each_step(records), updates, summary))
    run.summary_text.write_text(as_markdown(summary), encoding="utf-8")
    return summary


def summarize(run: RunFolder, records: Sequence[Record], updates: Updates) -> dict[str, Any]:
    """The run in numbers: accuracies from 0 to 1, times in seconds; None or empty where nothing was recorded."""
    attempts = [attempt.record for attempt in run.attempts]
    kept = last_of_each_step(records)
    steps = [record for record in kept if record.kind == "train"]
    evaluations = [record for record in kept if record.kind == "eval"]
    speeds = [record.tokens_per_second for record in steps]
    phases = time_by_phase(attempts, records)
    return {
        "run": str(run.root),
        "outcome": attempts[-1].get("outcome", "not ended") if attempts else "not started",
        "attempts": len(attempts),
        "steps": steps[-1].step if steps else 0,
        "accuracy": _accuracies(evaluations, validation_rows(run)),
        "convergence": convergence(accuracies(evaluations, validation_rows(run))),
        "sharpness": {name: statistics.fmean(values) for name, values in _told(steps, SHARPNESS).items()},
        "policy": {name: [values[0], values[-1]] for name, values in _told(steps, POLICY).items()},
        "budget": budget(updates),
        "seconds": sum(end - start for _, start, end in spans(attempts, records)),
        "seconds_by_phase": phases,
        "median_step_seconds": _median([record.metrics.get("timing/step_total") for record in steps]),
        "median_tokens_per_second": _median(speeds),
        "curves": str(run.curves),
    }


def validation_rows(run: RunFolder) -> dict[str, int]:
    """How many validation prompts each source has, as counted when the run was made."""
    rows: Counter[str] = Counter()
    provenance = read_json(run.provenance) if run.provenance.exists() else {}
    for facts in provenance.get("data", {}).get("eval.dataset", []):
        rows.update(facts["by_source"])
    return dict(rows)


def accuracies(evaluations: Sequence[Record], rows: Mapping[str, int]) -> dict[int, float]:
    """Accuracy over all prompts, 0 to 1, by step, of the evaluations that tell it."""
    found = {record.step: accuracy(record.metrics, rows) for record in evaluations}
    return {step: value for step, value in found.items() if value is not None}


def convergence(by_step: Mapping[int, float]) -> dict[str, float | None] | None:
    """The step from which accuracy no longer changes much, None if it does to the end; no answer of few evaluations."""
    from openrlhf.rlvr.diagnostics import convergence_step  # numpy, which no other command should pay

    if len(by_step) < EVALUATIONS:
        return None
    return {"step": convergence_step(list(by_step), list(by_step.values()))}


def _told(steps: Sequence[Record], names: Iterable[str]) -> dict[str, list[float]]:
    """Some metrics of the steps that have them."""
    found = {name: [step.metrics[name] for step in steps if name in step.metrics] for name in names}
    return {name: values for name, values in found.items() if values}


def _accuracies(evaluations: Sequence[Record], rows: Mapping[str, int]) -> dict[str, Any]:
    """Last evaluation, over all prompts and by source, beside the first one if there are two."""
    if not evaluations:
        return {}
    last, first = evaluations[-1], evaluations[0] if len(evaluations) > 1 else None
    earlier, later = first.metrics if first else {}, last.metrics
    before, after = accuracy(earlier, rows), accuracy(later, rows)
    sources_before, sources_after = accuracy_by_source(earlier), accuracy_by_source(later)
    return {
        "before": before,
        "before_step": first.step if first else None,
        "after": after,
        "after_step": last.step,
        "gain_points": 100 * (after - before) if before is not None and after is not None else None,
        "by_source": {
            name: {"before": sources_before.get(name), "after": sources_after[name], "prompts": rows.get(name)}
            for name in sorted(sources_after)
        },
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def spans(
    attempts: Sequence[Mapping[str, Any]], records: Sequence[Record]
) -> Iterator[tuple[list[Record], float, float]]:
    """The records of each attempt, its start and its end; one that never ended, because its machine died, counts up to
    its last record."""
    starts = [attempt["started"] for attempt in attempts if "started" in attempt]
    for attempt, start, until in zip(attempts, starts, [*starts[1:], math.inf], strict=False):
        own = [record for record in records if start <= record.time < until]
        yield own, start, attempt.get("ended", own[-1].time if own else start)


def time_by_phase(attempts: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> dict[str, float]:
    """Seconds of all attempts by phase; what no record accounts for is `other`, before the first one `start-up`.

    Phases of an asynchronous run overlap: there they add up to more than the run took.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for own, start, end in spans(attempts, records):
        cursor = start
        for record in own:
            spent = _phases_of_record(record, None if cursor == start else record.time - cursor)
            for phase, seconds in spent.items():
                total[phase] += seconds
            gap = record.time - cursor - sum(spent.values())
            total["start-up" if cursor == start else "other"] += max(0.0, gap)
            cursor = record.time
        total["start-up" if cursor == start else "other"] += max(0.0, end - cursor)
    return {phase: total[phase] for phase in ORDER if total[phase] > 0}


def _phases_of_record(record: Record, since_last: float | None) -> dict[str, float]:
    """What a record says of its own time; an evaluation that says nothing took the time `since_last`."""
    timed = {phase: record.metrics[key] for key, phase in PHASES.items() if key in record.metrics}
    if record.kind == "eval" and not timed and since_last is not None:
        return {"evaluation": since_last}
    return timed


def as_markdown(summary: Mapping[str, Any]) -> str:
    """The summary for reading."""
    lines = [f"# {summary['outcome'].capitalize()} after {summary['steps']} steps", ""]
    if summary["accuracy"].get("by_source"):
        lines += [*_accuracy_table(summary["accuracy"]), ""]
    if converged := summary["convergence"]:
        step = converged["step"]
        lines += ["Accuracy had not converged." if step is None else f"Accuracy converged at step {step:.0f}.", ""]
    if summary["policy"]:
        lines += [*_policy_table(summary["policy"]), ""]
    lines += [f"- {SHARPNESS[name]}: {value:.4g} (mean over steps)" for name, value in summary["sharpness"].items()]
    lines += [""] * bool(summary["sharpness"])
    if summary["budget"]:
        lines += [*_budget_table(summary["budget"]), ""]
    if summary["seconds"]:
        lines += [*_time_table(summary), ""]
    if summary["median_step_seconds"] is not None:
        speed = summary["median_tokens_per_second"]
        words = f", {speed:.0f} response tokens per second" if speed is not None else ""
        lines += [f"A step takes {summary['median_step_seconds']:.2f} s (median){words}.", ""]
    lines += [f"- run folder: {summary['run']}", f"- curves: {summary['curves']}"]
    return "\n".join(lines) + "\n"


def _accuracy_table(accuracies: Mapping[str, Any]) -> Iterator[str]:
    heads = [f"after step {accuracies['after_step']}"]
    if accuracies["before_step"] is not None:
        heads = [f"after step {accuracies['before_step']}", *heads, "points"]
    yield f"| validation accuracy | prompts | {' | '.join(heads)} |"
    yield "|---|--:|" + "--:|" * len(heads)
    sources = accuracies["by_source"]
    prompts = [row["prompts"] or 0 for row in sources.values()]
    for name, row in {**sources, "**all**": {**accuracies, "prompts": sum(prompts) if all(prompts) else None}}.items():
        cells = [f"{100 * row['after']:.1f} %"]
        if accuracies["before_step"] is not None:
            before = row["before"]
            known = before is not None
            cells = [
                f"{100 * before:.1f} %" if known else "",
                *cells,
                f"{100 * (row['after'] - before):+.1f}" if known else "",
            ]
        yield f"| {name} | {row['prompts'] or ''} | {' | '.join(cells)} |"


def _policy_table(ends: Mapping[str, Sequence[float]]) -> Iterator[str]:
    yield "| policy, at the tokens that it sampled | at first | at last |"
    yield "|---|--:|--:|"
    for name, (first, last) in ends.items():
        yield f"| {POLICY[name]} | {first:.4f} | {last:.4f} |"


def _budget_table(spent: Mapping[str, Any]) -> Iterator[str]:
    yield "| budget | prompts drawn | samples | a prompt | right | taught |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, row in {**spent["by_source"], "**all**": spent}.items():
        cells = f"{row['prompts']} | {row['samples']} | {row['samples_per_prompt']:.1f}"
        right = f"{100 * row['share_right']:.1f} %" if row["share_right"] is not None else ""
        yield f"| {name} | {cells} | {right} | {100 * row['share_taught']:.1f} % |"
    yield ""
    yield "Taught: samples in groups whose advantages differ."


def _time_table(summary: Mapping[str, Any]) -> Iterator[str]:
    yield "| time | | share |"
    yield "|---|--:|--:|"
    for phase, seconds in summary["seconds_by_phase"].items():
        yield f"| {phase} | {duration(seconds)} | {100 * seconds / summary['seconds']:.0f} % |"
    yield f"| **all** | {duration(summary['seconds'])} | |"
