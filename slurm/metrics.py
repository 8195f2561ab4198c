"""Reading `metrics.jsonl`, the trainer's record of its steps and evaluations."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PASS1 = re.compile(r"eval_(.+)_pass1")


@dataclass(frozen=True)
class Record:
    """One line: a training step or an evaluation after `step` steps, written at `time` (Unix seconds)."""

    kind: Literal["train", "eval"]
    step: int
    time: float
    metrics: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens of a step over its whole duration."""
        try:
            tokens = self.metrics["rollout/response_length_mean"] * self.metrics["rollout/num_samples"]
            return tokens / self.metrics["timing/step_total"]
        except (KeyError, ZeroDivisionError):
            return None


def parse_record(line: str) -> Record | None:
    """The record of one line; None for a line that holds none, such as the half-written end of a killed attempt."""
    try:
        row = json.loads(line)
        numbers = {key: float(value) for key, value in row["metrics"].items() if isinstance(value, int | float)}
        return Record(row["kind"], int(row["step"]), float(row["time"]), numbers)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_records(path: Path) -> list[Record]:
    """All records of a file, in the order written; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [record for record in map(parse_record, lines) if record]


def last_of_each_step(records: Sequence[Record]) -> list[Record]:
    """Steps in order, without what a resumed attempt did again: it replaces all from its first step on, and of equal
    kind and step the last one counts."""
    kept: dict[tuple[int, bool], Record] = {}
    for record in records:
        if record.kind == "train":
            kept = {key: earlier for key, earlier in kept.items() if key[0] < record.step}
        kept[record.step, record.kind == "eval"] = record
    return [kept[key] for key in sorted(kept)]


def accuracy_by_source(metrics: Mapping[str, float]) -> dict[str, float]:
    """Share of samples that are right, 0 to 1, for each `datasource` of an evaluation."""
    found = {PASS1.fullmatch(key): value for key, value in metrics.items()}
    return {match[1]: value for match, value in found.items() if match}


def accuracy(metrics: Mapping[str, float], rows: Mapping[str, int]) -> float | None:
    """Share of samples that are right over all prompts, where `rows` tells how many prompts each source has."""
    by_source = accuracy_by_source(metrics)
    weights = {source: rows.get(source, 0) for source in by_source}
    if not all(weights.values()):
        weights = dict.fromkeys(by_source, 1)  # of unknown size: each source counts the same
    total = sum(weights.values())
    return sum(value * weights[source] for source, value in by_source.items()) / total if total else None


def follow(path: Path, start: int = 0) -> Iterator[list[str]]:
    """Endless: each step gives the lines that were completed since the one before, from byte `start` on."""
    position, rest = start, b""
    while True:
        added = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                added = file.read()
        position += len(added)
        *lines, rest = (rest + added).split(b"\n")
        yield [line.decode("utf-8", "replace") for line in lines]
