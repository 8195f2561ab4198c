"""The local executor: runs a job here, shows it, ends all of it, and says how it went."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from slurm import ROOT
from slurm.config import Config
from slurm.environment import chosen, trainer_environment
from slurm.placement import accelerators
from slurm.problems import UserError
from slurm.processes import caught_signals, end_run, start
from slurm.run_folder import Attempt, RunFolder
from slurm.schema import TRAINER, trainer_flags

TICK = 0.2
"""Seconds between two looks at a running process."""


@dataclass(frozen=True)
class Preparation:
    """A module that makes a run's inputs in `folder`, all or nothing; `done` is in it when they are there."""

    module: str
    folder: Path
    done: str

    @property
    def needed(self) -> bool:
        """Whether nothing is there, or the module has changed since; it looks closer itself, but starts slowly."""
        made = self.folder / self.done
        sources = (ROOT / self.module.replace(".", "/")).glob("*.py")
        return not made.is_file() or any(source.stat().st_mtime > made.stat().st_mtime for source in sources)


PREPARATIONS = {"tiny_task": Preparation("openrlhf.rlvr.tiny_task", ROOT / "build" / "tiny", "manifest.json")}

FAILED = re.compile(r"run failed: .*")
"""What the trainer says last, once it knows what ended it."""

ERROR = re.compile(
    r"(?:\([^)]*\) |ERROR \S+ \S+ \[[^]]*\] )*([\w.]*(?:Error|Exception)\b.*|.*\berror: .*|Segmentation fault.*)"
)
"""The last line of a traceback, after what Ray and vLLM put before each line."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def preparation_of(config: Config) -> Preparation | None:
    """What has still to be made before `config` can run."""
    preparation = PREPARATIONS[config.launch.prepare] if config.launch.prepare else None
    return preparation if preparation and preparation.needed else None


def prepare(config: Config, preparation: Preparation) -> int:
    """Make a run's inputs; returns the exit status. Raises UserError with the reason if they could not be made."""
    folder = preparation.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", preparation.module, "--output", str(folder)]
    with caught_signals() as signals:
        status, _ = _supervise(command, trainer_environment(config.launch, folder), log, folder, signals, lambda: None)
    if status and not signals:
        raise UserError("\n".join((f"{preparation.module} failed with status {status}", *failure(log), f"log: {log}")))
    if not status:
        (folder / preparation.done).touch()
    return status


def check_devices(config: Config, there: int) -> None:
    """Raises UserError if the configuration wants more accelerators than are `there`; CPU ranks share the cores."""
    needed = accelerators(config)
    if config.launch.device == "cuda" and sum(needed.values()) > there:
        words = ", ".join(f"{part} {count}" for part, count in needed.items() if count)
        raise UserError(f"this recipe places {sum(needed.values())} GPUs ({words}), and {there} are visible here")


def visible_gpus() -> int:
    """GPUs that the driver shows, or as many of them as CUDA_VISIBLE_DEVICES lists."""
    chosen_ones = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen_ones is not None:
        return len([device for device in chosen_ones.split(",") if device.strip()])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def trainer_command(run: RunFolder, config: Config, resume: bool = False) -> list[str]:
    """The command line of the trainer for this run folder."""
    flags = trainer_flags()
    owned = run.flags(config) | ({"ckpt.load_enable": True} if resume else {})
    words = [word for name, value in owned.items() for word in flags[name].arguments(value)]
    return [sys.executable, "-m", TRAINER, *config.arguments(), *words]


def execute(run: RunFolder, config: Config, attempt: Attempt, command: Sequence[str], tick: Callable[[], None]) -> int:
    """Run the trainer's `command`, calling `tick` meanwhile; returns its exit status, or 128 + the signal that ended
    the run. Whatever happens, no process of the run is left."""
    attempt.note(started=time.time(), command=list(command), environment=chosen(config.launch, run.root))
    environment = trainer_environment(config.launch, run.root)
    with caught_signals() as signals:
        status, left = _supervise(command, environment, attempt.log, run.root, signals, tick)
    outcome = "stopped" if signals else "failed" if status else "finished"
    reason = failure(attempt.log) if outcome == "failed" else []
    attempt.note(ended=time.time(), exit_code=status, outcome=outcome, reason=reason, not_ended=left)
    return status


def _supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    owner: Path,
    signals: Sequence[int],
    tick: Callable[[], None],
) -> tuple[int, list[int]]:
    """The exit status of `command`, and the processes that would not end."""
    process = start(command, environment, log)
    try:
        while process.poll() is None and not signals:
            tick()
            with suppress(TimeoutExpired):
                process.wait(TICK)
        tick()
    finally:
        left = end_run(owner, process, signals)
    code = process.returncode
    return (128 + signals[0] if signals else 128 - code if code < 0 else code), left


def failure(log: Path) -> list[str]:
    """The lines of a log that say best why a process failed: the trainer's own reason and the first error, which is
    where the others came from; without any, the last lines."""
    if not log.is_file():
        return []
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = [line for line in (COLOUR.sub("", line).strip() for line in file) if line]
    said = [match[0] for match in map(FAILED.search, lines) if match][-1:]
    errors = [match[1] for match in map(ERROR.fullmatch, lines) if match][:1]
    return [*said, *(error for error in errors if error not in "".join(said))] or lines[-3:]
