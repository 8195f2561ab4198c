"""The one place that knows how a run folder is laid out.

    runs/<name>-<time>/
      config.yaml        resolved configuration; also a recipe that repeats the run
      command.json       what the user typed
      provenance.json    fork, versions, git state, data: what made this run
      attempts/1/        attempt.json (start, end, exit status, trainer's command), driver.log; a resume adds 2, 3, ...
      metrics.jsonl      one JSON object a line, written by the trainer, appended to by every attempt
      groups/            draws.jsonl, updates.jsonl: which prompts were drawn, and what came of each; likewise
      tensorboard/  checkpoints/  model/
      report/            curves.png, summary.json, summary.md
    runs/comparison-<time>/  comparison.png, comparison.json, comparison.md: several runs beside each other

Nothing is overwritten but the report. No secret is written: configurations cannot hold one, and of the environment
only what the launcher sets is recorded by value.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm.config import Config, read_config, shown
from slurm.problems import UserError
from slurm.schema import RUN_NAME

LATEST = "latest"


@dataclass(frozen=True)
class Attempt:
    """One start of the trainer."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def log(self) -> Path:
        return self.folder / "driver.log"

    @property
    def record(self) -> dict[str, Any]:
        """started, ended (Unix seconds), command, environment, exit_code, outcome, reason; what is known so far."""
        path = self.folder / "attempt.json"
        return read_json(path) if path.exists() else {}

    def note(self, **facts: Any) -> None:
        """Add facts to the record."""
        write_json(self.folder / "attempt.json", self.record | facts)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def command(self) -> Path:
        return self.root / "command.json"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def groups(self) -> Path:
        return self.root / "groups"

    @property
    def draws(self) -> Path:
        return self.groups / "draws.jsonl"

    @property
    def updates(self) -> Path:
        return self.groups / "updates.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def curves(self) -> Path:
        return self.root / "report" / "curves.png"

    @property
    def summary_json(self) -> Path:
        return self.root / "report" / "summary.json"

    @property
    def summary_text(self) -> Path:
        return self.root / "report" / "summary.md"

    @property
    def attempts(self) -> list[Attempt]:
        """Every attempt so far, the first first."""
        folders = (folder for folder in (self.root / "attempts").glob("*") if folder.name.isdigit())
        return sorted(map(Attempt, folders), key=lambda attempt: attempt.number)

    def new_attempt(self) -> Attempt:
        """Make the folder of the next attempt."""
        numbers = [attempt.number for attempt in self.attempts]
        attempt = Attempt(self.root / "attempts" / str(max(numbers, default=0) + 1))
        attempt.folder.mkdir(parents=True)
        return attempt

    def read_config(self) -> Config:
        return read_config(self.config)

    def flags(self, config: Config) -> dict[str, Any]:
        """Values of the flags that the launcher owns, for a run in this folder."""
        owned: dict[str, Any] = {
            "ckpt.output_dir": str(self.model),
            "ckpt.path": str(self.checkpoints),
            "logger.groups_path": str(self.groups),
            "logger.metrics_path": str(self.metrics),
            "logger.tensorboard_dir": str(self.tensorboard),
        }
        return owned if RUN_NAME in config.settings else owned | {RUN_NAME: self.root.name}

    @property
    def has_checkpoint(self) -> bool:
        """Whether the trainer would find something to resume from: DeepSpeed names its newest one in `latest`."""
        return (self.checkpoints / "_actor" / "latest").is_file()


def create_run(runs: Path, name: str, config: Config, typed: Sequence[str], provenance: Mapping[str, Any]) -> RunFolder:
    """Make a new folder below `runs`, write what is known before the start, and point `runs/latest` to it."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(new_folder(runs, stem))
    folder.config.write_text(config.dump(), encoding="utf-8")
    write_json(folder.command, {"typed": list(typed), "folder": os.getcwd()})
    write_json(folder.provenance, provenance)
    fresh = runs / f".{LATEST}-{folder.root.name}"
    fresh.symlink_to(folder.root.name)
    fresh.replace(runs / LATEST)
    return folder


def new_folder(runs: Path, stem: str) -> Path:
    """Make and return the first of `stem`, `stem-2`, `stem-3`, ... that is not there; links in `runs` are followed,
    because a run's processes bear the path that `open_run` finds it by."""
    number = 1
    while True:
        folder = runs.resolve() / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def open_run(path: Path) -> RunFolder:
    """The run folder at `path`. Raises UserError if it is none."""
    folder = RunFolder(path.resolve())
    if not folder.config.is_file():
        raise UserError(f"{shown(path)} is not a run folder: it has no {folder.config.name}")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), f"{path} holds no JSON object"
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write all or nothing: a reader, or the next start after a crash, never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)
