"""Derive every number of samples and every advantage of a run again, from its verdicts and rewards alone.

    python -m openrlhf.rlvr.audit runs/NAME

reads ``groups/`` of the run folder, where each draw stands with the scores of its samples, and repeats what the run did
with them. It exits with 1 where a number differs, or where a sample was lost or learnt twice.
"""

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf.rlvr.advantages import ESTIMATORS, group_advantages
from openrlhf.rlvr.allocation import PromptStatistics, share

Row = Mapping[str, Any]


def audit(folder: Path) -> list[str]:
    """What does not follow from what came before it, in the records of a ``groups`` folder; nothing if all is right."""
    calls, steps = read_calls(folder / "draws.jsonl"), read_steps(folder / "updates.jsonl")
    return [*_counts(calls), *_advantages(steps), *_samples(calls, steps)]


def read_calls(path: Path) -> list[tuple[Row, list[Row]]]:
    """Settings and draws of each generation, in order; a resumed attempt replaces those from its first call on."""
    calls: dict[int, tuple[Row, list[Row]]] = {}
    settings: Row = {}
    for row in _read(path):
        if row["kind"] == "settings":
            settings = row
            calls = {call: kept for call, kept in calls.items() if call < row["call"]}
        else:
            calls.setdefault(row["call"], (settings, []))[1].append(row)
    return [calls[call] for call in sorted(calls)]


def read_steps(path: Path) -> list[Row]:
    """The record of each step; a resumed attempt replaces the steps from its first one on."""
    steps: dict[int, Row] = {}
    for row in _read(path):
        steps = {step: kept for step, kept in steps.items() if step < row["step"]}
        steps[row["step"]] = row
    return list(steps.values())


def _read(path: Path) -> Iterator[Row]:
    """Rows of a file; an end that was being written when the run was killed is none."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _counts(calls: Iterable[tuple[Row, Sequence[Row]]]) -> Iterator[str]:
    statistics = PromptStatistics()
    for settings, draws in calls:
        statistics.decay = settings["decay"]
        by_number = {row["draw"]: row for row in draws}
        parts = defaultdict(list)
        for row in draws:
            if row["replaces"] is None:
                parts[row["batch"]].append(row)
            elif row["count"] != by_number[row["replaces"]]["count"]:
                yield f"draw {row['draw']}: {row['count']} samples, but it replaces draw {row['replaces']}"
        options = [settings[name] for name in ("exponent", "min_history", "mastery")]
        bounds = [settings[name] for name in ("average", "min_samples", "max_samples")]
        for part in parts.values():
            weights = statistics.weights([row["prompt_id"] for row in part], *options)
            dynamic = settings["strategy"] == "dynamic"
            expected = share(weights, *bounds) if dynamic else [settings["average"]] * len(part)
            for row, count in zip(part, expected, strict=True):
                if row["count"] != count:
                    yield f"draw {row['draw']}: {row['count']} samples, {count} follow from the verdicts before it"
        for row in draws:
            if (row["seen"], row["right"]) != statistics.counts(row["prompt_id"]):
                yield f"draw {row['draw']}: {row['right']} of {row['seen']} right before it, not what was verified"
        for row in draws:
            if len(row["scores"]) != row["count"]:
                yield f"draw {row['draw']}: {len(row['scores'])} samples came of {row['count']}"
            if None not in row["scores"]:
                right = sum(score >= settings["correct_score"] for score in row["scores"])
                statistics.update(row["prompt_id"], len(row["scores"]), right)


def _advantages(steps: Iterable[Row]) -> Iterator[str]:
    for step in steps:
        if step["estimator"] not in ESTIMATORS:
            continue
        groups = step["groups"]
        ids = torch.tensor([group["draw"] for group in groups for _ in group["rewards"]])
        columns = [torch.tensor(_flat(groups, name)) for name in ("rewards", "shaped", "lengths")]
        options = {name: step[name] for name in ("penalties", "ddof", "group_weight")}
        rewards, shaped, lengths = columns
        expected = group_advantages(rewards, ids, step["estimator"], shaped=shaped, valid=lengths > 0, **options)
        differing = (expected != torch.tensor(_flat(groups, "advantages"))).nonzero().squeeze(-1)
        for place in differing.tolist():
            yield f"step {step['step']}, draw {ids[place]}: an advantage that does not follow from the rewards"


def _flat(groups: Sequence[Row], name: str) -> list[float]:
    return [value for group in groups for value in group.get(name, group["rewards"])]


def _samples(calls: Iterable[tuple[Row, Sequence[Row]]], steps: Sequence[Row]) -> Iterator[str]:
    """Every accepted group is learnt once and whole; those after the last step may still wait."""
    accepted = {row["draw"]: row["count"] for _, draws in calls for row in draws if row["accepted"]}
    learnt = Counter(group["draw"] for step in steps for group in step["groups"])
    for step in steps:
        for group in step["groups"]:
            if accepted.get(group["draw"]) != len(group["rewards"]):
                yield f"step {step['step']}, draw {group['draw']}: {len(group['rewards'])} samples learnt, not all"
    yield from (f"draw {draw}: learnt {times} times" for draw, times in learnt.items() if times > 1)
    last = max(learnt, default=-1)
    yield from (f"draw {draw}: accepted and never learnt" for draw in accepted if draw < last and draw not in learnt)


def spread(calls: Sequence[tuple[Row, Sequence[Row]]]) -> tuple[float, float]:
    """How far the last draws of all prompts are from equal numbers of samples.

    Returns:
        The share of prompts with another number than the average, and the rank correlation of number and weight over
        those strictly within their bounds, in the mean over batches, within which the samples are shared.
    """
    last = {row["prompt_id"]: (settings, row) for settings, rows in calls for row in rows}
    apart = [row["count"] != settings["average"] for settings, row in last.values()]
    batches = defaultdict(list)
    for settings, row in last.values():
        if row["weight"] is not None and settings["min_samples"] < row["count"] < settings["max_samples"]:
            batches[row["call"], row["batch"]].append((row["weight"], row["count"]))
    found = [rank_correlation(*zip(*pairs, strict=True)) for pairs in batches.values() if len(pairs) > 2]
    known = [value for value in found if not math.isnan(value)]
    return sum(apart) / len(apart), sum(known) / len(known) if known else math.nan


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, with average ranks for ties; NaN where one side is constant."""

    def ranks(values: Sequence[float]) -> Any:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]

    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m openrlhf.rlvr.audit", description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder, such as runs/latest")
    folder = parser.parse_args().run / "groups"
    for name in ("draws.jsonl", "updates.jsonl"):
        if not (folder / name).is_file():
            print(
                f"{folder / name}: no such file; runs with --logger.groups_path and an allocation or reward budgeting "
                "write it",
                file=sys.stderr,
            )
            return 2
    faults = audit(folder)
    for fault in faults:
        print(fault)
    calls = read_calls(folder / "draws.jsonl")
    draws = [row for _, rows in calls for row in rows]
    learnt = sum(len(group["rewards"]) for step in read_steps(folder / "updates.jsonl") for group in step["groups"])
    samples = sum(row["count"] for row in draws)
    print(f"{len(draws)} draws, {samples} samples, {learnt} of them learnt: {len(faults) or 'no'} faults")
    apart, correlation = spread(calls)
    print(
        f"of the last draw of each prompt, {100 * apart:.0f} % had another number of samples than the average; within "
        f"bounds and batches their numbers rank with their weights by {correlation:.2f} (Spearman)"
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
