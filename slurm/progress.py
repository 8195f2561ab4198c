"""What the user sees of a run while it runs: a live line on a terminal, plain lines anywhere else.

Everything shown is read from the run folder: the stage of the start from the trainer's log, the rest from its metrics.
"""

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from slurm.metrics import Record, accuracy, accuracy_by_source, follow, parse_record
from slurm.run_folder import Attempt, RunFolder

STAGES = (
    ("loading the engines", re.compile(r"Started a local Ray instance")),
    ("loading the models", re.compile(r"Actor\(|DeepSpeedEngine|DeepSpeed info")),
    ("generating", re.compile(r"Episode \[\d+/\d+\]")),
    ("evaluating", re.compile(r"Evaluation start time")),
    ("training", re.compile(r"Global step \d+")),
    ("saving the model", re.compile(r"Writing model shards")),
)
"""Stages of a run, and what in the log shows that each began."""

PLAIN_LINES = 20
"""About how many steps a run reports where there is no terminal."""

EXPENDABLE = ("gradient", "tokens/s", "reward", "samples", "learning")
"""What a step's line leaves out where the terminal is too narrow for it, the first first."""

BESIDE = 34
"""Columns of the live line that its spinner, the step's number, a piece of the bar and the time take."""


@dataclass
class Status:
    """What is known of a run: its stage, its last step, its evaluations."""

    total: int | None
    rows: Mapping[str, int]
    stage: str = "starting Ray"
    last: Record | None = None
    times: deque[float] = field(default_factory=lambda: deque(maxlen=11))

    def see(self, record: Record) -> None:
        if record.kind == "train":
            self.last = record
            self.times.append(record.time)

    @property
    def seconds_left(self) -> float | None:
        """Time that the remaining steps take at the pace of the last ten."""
        if not self.total or not self.last or len(self.times) < 2:
            return None
        pace = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        return max(0, self.total - self.last.step) * pace

    def step(self, width: int = 200) -> str:
        """The last step as a line of text, of at most `width` characters while there is something to leave out."""
        if not self.last:
            return ""
        metrics = self.last.metrics
        numbers = (
            ("reward", metrics.get("rollout/reward_mean", metrics.get("reward")), "{:.2f}"),
            ("accuracy", metrics.get("accuracy"), "{:.2f}"),
            ("tokens/s", self.last.tokens_per_second, "{:.0f}"),
            ("gradient", metrics.get("actor_grad_norm"), "{:.2f}"),
        )
        words = {name: f"{name} {form.format(value)}" for name, value, form in numbers if value is not None}
        words |= _budget(metrics)
        if (left := self.seconds_left) is not None:
            words["left"] = f"left {clock(left)}"
        for name in EXPENDABLE:
            if len("  ".join(words.values())) > width:
                words.pop(name, None)
        return "  ".join(words.values())

    def evaluation(self, record: Record) -> str:
        """An evaluation as a line of text."""
        overall = accuracy(record.metrics, self.rows)
        if overall is None:
            return f"evaluated after step {record.step}"
        parts = accuracy_by_source(record.metrics)
        words = ", ".join(f"{source} {value:.2f}" for source, value in sorted(parts.items()))
        return f"accuracy {overall:.2f} after step {record.step}" + (f" ({words})" if len(parts) > 1 else "")


def _budget(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """How many samples the prompts of a step got, and the share of samples in groups of differing rewards."""
    fewest, most = metrics.get("groups/count_min"), metrics.get("groups/count_max")
    if fewest is not None and most is not None:
        yield "samples", f"samples {fewest:.0f}" + (f"-{most:.0f}" if most > fewest else "")
    effective, samples = metrics.get("groups/effective_samples"), metrics.get("rollout/num_samples")
    if effective is not None and samples:
        yield "learning", f"learning from {100 * effective / samples:.0f} %"


def clock(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Seconds for a table: 75.3 s, and from two minutes on as a clock shows them."""
    return f"{seconds:.1f} s" if seconds < 120 else clock(seconds)


class Watch:
    """Shows one attempt; `tick` is called a few times a second until `close`."""

    def __init__(self, run: RunFolder, attempt: Attempt, status: Status, console: Console) -> None:
        self.status, self.console = status, console
        self._began = time.monotonic()
        self._log = follow(attempt.log)
        self._metrics = follow(run.metrics, run.metrics.stat().st_size if run.metrics.exists() else 0)
        self._every = max(1, (status.total or 10 * PLAIN_LINES) // PLAIN_LINES)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(24),
                TextColumn("{task.fields[line]}"),
            )
            # Drawn from `tick` alone: a thread that draws would hold up ending the run.
            self._bar = Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(status.stage, total=status.total, line="")
            self._bar.start()

    def tick(self) -> None:
        """Read what is new and show it."""
        for record in filter(None, map(parse_record, next(self._metrics))):
            self.status.see(record)
            if record.kind == "eval":
                self._say(self.status.evaluation(record))
            elif not self._bar and (record.step % self._every == 0 or record.step in (1, self.status.total)):
                self._say(f"step {record.step}/{self.status.total or '?'}  {self.status.step()}")
        for line in next(self._log):
            for stage, sign in STAGES:
                if sign.search(line) and stage != self.status.stage:
                    self._enter(stage)
        if self._bar:
            step = self.status.last.step if self.status.last else 0
            head = f"step {step}/{self.status.total or '?'}" if step else self.status.stage
            line = self.status.step(self.console.width - BESIDE)
            self._bar.update(self._task, completed=step, description=head, line=line, refresh=True)

    def _enter(self, stage: str) -> None:
        self.status.stage = stage
        if not self._bar and (not self.status.last or stage in ("evaluating", "saving the model")):
            self._say(stage)

    def _say(self, text: str) -> None:
        self.console.print(
            f"[dim]{clock(time.monotonic() - self._began):>6}[/]  {text}", soft_wrap=True, highlight=False
        )

    def close(self) -> None:
        """Show what came last and give the terminal back."""
        self.tick()
        if self._bar:
            self._bar.stop()
