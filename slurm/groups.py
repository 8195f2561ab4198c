"""Reading `groups/updates.jsonl`: what each prompt of a training step got, and what came of it."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Group:
    """One draw of a prompt: the samples of it in one step.

    `share_right` is the share of its earlier samples that were right, None where too few of them were known to go by;
    `correct` is None where no verdicts were given; `taught` says whether the advantages of its samples differ.
    """

    source: str
    share_right: float | None
    count: int
    correct: int | None
    taught: bool


Updates = Mapping[int, Sequence[Group]]
"""The groups of each training step, in order of step; every group has a sample, and every step a group."""


def read_updates(path: Path) -> Updates:
    """The steps of a file, whose groups are not empty. Empty without a file."""
    return {step: groups for step, row in last_steps(path).items() if (groups := _groups(row))}


def last_steps(path: Path) -> dict[int, Mapping[str, Any]]:
    """The row of each step; a resumed attempt replaces all steps from its first one on. Empty without a file."""
    steps: dict[int, Mapping[str, Any]] = {}
    for row in read_rows(path):
        steps = {step: kept for step, kept in steps.items() if step < row["step"]}
        steps[int(row["step"])] = row
    return steps


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a file; a line that holds none, such as the half-written end of a killed attempt, is left
    out. None without a file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and ("step" in row or "kind" in row):
                yield row


def _groups(row: Mapping[str, Any]) -> list[Group]:
    try:
        return [_group(group) for group in row["groups"]]
    except (ValueError, KeyError, TypeError):
        return []


def _group(row: Mapping[str, Any]) -> Group:
    known = row["weight"] is not None and row["seen"] > 0
    return Group(
        source=str(row["source"]),
        share_right=row["right"] / row["seen"] if known else None,
        count=int(row["count"]),
        correct=None if row["correct"] is None else int(row["correct"]),
        taught=len(set(row["advantages"])) > 1,
    )


def budget(updates: Updates) -> dict[str, Any]:
    """Where the samples of a run went, in all and by source, easiest source first; empty where nothing was recorded.

    `prompts` counts draws; shares are from 0 to 1 and of samples: those that were right (None without verdicts), those
    that `taught`.
    """
    groups = [group for step in updates.values() for group in step]
    if not groups:
        return {}
    by_source = {source: _spent(of) for source, of in _grouped(groups).items()}
    easiest_first = sorted(by_source, key=lambda source: (-(by_source[source]["share_right"] or 0), source))
    return {**_spent(groups), "by_source": {source: by_source[source] for source in easiest_first}}


def _grouped(groups: Sequence[Group]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.source, []).append(group)
    return found


def _spent(groups: Sequence[Group]) -> dict[str, Any]:
    samples = sum(group.count for group in groups)
    right = [group.correct for group in groups if group.correct is not None]
    return {
        "prompts": len(groups),
        "samples": samples,
        "samples_per_prompt": samples / len(groups),
        "share_right": sum(right) / samples if len(right) == len(groups) else None,
        "share_taught": sum(group.count for group in groups if group.taught) / samples,
    }


def shares(updates: Updates, sources: Sequence[str], of: Callable[[Group], int]) -> list[list[float]]:
    """For each source, its share, 0 to 1, of what `of` says of the groups of each step, such as their samples."""
    totals: list[Counter[str]] = []
    for groups in updates.values():
        totals.append(Counter())
        for group in groups:
            totals[-1][group.source] += of(group)
    return [[total[source] / total.total() for total in totals] for source in sources]


@dataclass(frozen=True)
class Bin:
    """Draws of prompts of like difficulty: the mean `share_right`, and mean and 10th and 90th percentile of `count`."""

    share_right: float
    mean: float
    low: float
    high: float


def by_difficulty(groups: Sequence[Group], bins: int = 10) -> Iterator[Bin]:
    """Draws with a known `share_right`, in `bins` equal ranges of it from 0 to 1; ranges without draws are left out."""
    places: dict[int, list[Group]] = {}
    for group in groups:
        if group.share_right is not None:
            places.setdefault(min(int(group.share_right * bins), bins - 1), []).append(group)
    for _, held in sorted(places.items()):
        counts = sorted(group.count for group in held)
        yield Bin(
            share_right=sum(group.share_right or 0.0 for group in held) / len(held),
            mean=sum(counts) / len(counts),
            low=counts[round(0.1 * (len(counts) - 1))],
            high=counts[round(0.9 * (len(counts) - 1))],
        )


def last_third(updates: Updates) -> list[Group]:
    """The groups of the last third of the recorded steps, of one step at least if there is any."""
    steps = list(updates.values())
    return [group for groups in steps[-max(1, len(steps) // 3) :] for group in groups]
