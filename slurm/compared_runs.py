"""The runs of a comparison: reading each, telling which belong together, and what they differ in."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from slurm.config import Config, shown
from slurm.draws import generated_by_step
from slurm.inputs import CODE, DATA, MODELS
from slurm.metrics import last_of_each_step, read_records
from slurm.problems import UserError
from slurm.report import accuracies, validation_rows
from slurm.run_folder import RunFolder, open_run, read_json
from slurm.schema import RUN_NAME

SEED = "train.seed"
TOLD_APART = {SEED, RUN_NAME, *MODELS, *DATA, *CODE}
"""Settings in which the runs of a group may differ; of data, the contents are compared and not the paths."""

TIME = re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""What `create_run` adds to a name."""


@dataclass(frozen=True)
class Run:
    """A finished run, by step: samples so far that were `learnt` from and that were `generated` (None if that is not
    known), accuracies of evaluations, and the share, 0 to 1, of a step's samples that taught something."""

    folder: Path
    group: str
    config: Config
    started: float
    contents: Mapping[str, Sequence[str]]
    learnt: Mapping[int, int]
    generated: Mapping[int, int] | None
    accuracies: Mapping[int, float]
    effective: Mapping[int, float]

    @property
    def seed(self) -> int:
        return int(self.config[SEED])


def group_of(folder: Path) -> str:
    """The recipe, or the `--name` of the user, after which a run's folder was named."""
    return TIME.sub("", folder.name) or folder.name


def read_runs(paths: Iterable[Path]) -> tuple[list[Run], dict[str, str]]:
    """The runs at `paths`, each folder once, and why others were left out, by folder."""
    runs: list[Run] = []
    left_out: dict[str, str] = {}
    for path in dict.fromkeys(path.resolve() for path in paths):
        try:
            runs.append(read_run(path))
        except (UserError, OSError, ValueError, KeyError, TypeError) as error:
            lines = str(error).splitlines()
            reason = lines[0] if isinstance(error, UserError) else f"cannot be read: {type(error).__name__}: {error}"
            left_out[shown(path)] = reason.removeprefix(f"{shown(path)} ")
    for run in list(runs):
        last = max((other for other in runs if (other.group, other.seed) == (run.group, run.seed)), key=_started)
        if last is not run:
            runs.remove(run)
            left_out[shown(run.folder)] = f"has the seed {run.seed} of {shown(last.folder)}, which was started later"
    return runs, left_out


def _started(run: Run) -> tuple[float, str]:
    return run.started, run.folder.name


def read_run(path: Path) -> Run:
    """The run at `path`. Raises UserError if it is none, did not finish, or was never evaluated."""
    folder = open_run(path)
    config = folder.read_config()
    attempts = [attempt.record for attempt in folder.attempts]
    outcome = attempts[-1].get("outcome", "not ended") if attempts else "not started"
    if outcome != "finished":
        raise UserError(f"did not finish: its last attempt is {outcome}" if attempts else "was not started")
    records = last_of_each_step(read_records(folder.metrics))
    trained = {record.step: record.metrics for record in records if record.kind == "train"}
    rows = validation_rows(folder)
    found = accuracies([record for record in records if record.kind == "eval"], rows)
    if not found:
        raise UserError("was not evaluated: eval.at_start and eval.at_end, or eval.steps, do that")
    if any("rollout/num_samples" not in metrics for metrics in trained.values()):
        raise UserError("has steps without rollout/num_samples: the samples that it used are not known")
    counts = [int(metrics["rollout/num_samples"]) for metrics in trained.values()]
    learnt = dict(zip(trained, accumulate(counts), strict=True))
    generated = generated_by_step(folder.draws, folder.updates)
    if generated is None and not config["algo.dynamic_filtering_enable"]:
        generated = learnt  # without filtering all that is generated is learnt from
    return Run(
        folder=folder.root,
        group=group_of(folder.root),
        config=config,
        started=attempts[0].get("started", 0.0),
        contents=_contents(folder),
        learnt=learnt,
        generated=generated,
        accuracies=found,
        effective={
            step: metrics["groups/effective_samples"] / count
            for (step, metrics), count in zip(trained.items(), counts, strict=True)
            if count and "groups/effective_samples" in metrics
        },
    )


def _contents(folder: RunFolder) -> dict[str, list[str]]:
    """Checksums of the prompt files that a run was made with."""
    provenance = read_json(folder.provenance) if folder.provenance.exists() else {}
    files: dict[str, list[dict[str, Any]]] = provenance.get("data", {})
    return {key: [facts["sha256"] for facts in files[key] if "sha256" in facts] for key in files}


def samples_at(cumulative: Mapping[int, int], step: int) -> int:
    """Samples up to and with `step`."""
    return max((count for other, count in cumulative.items() if other <= step), default=0)


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings in which runs differ other than by seed and path, each with its values in order of the runs."""
    keys = sorted({key for run in runs for key in run.config.settings} - TOLD_APART)
    values = {key: [run.config[key] for run in runs] for key in keys}
    for key in DATA:
        if all(run.contents.get(key) for run in runs):
            values[f"{key} (contents)"] = [", ".join(sha[:8] for sha in run.contents[key]) for run in runs]
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}
