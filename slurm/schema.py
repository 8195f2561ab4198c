"""What the trainer's flags are, read from the generated `flags.json`: which values each takes, and how it is written.

The file holds names, types, choices and defaults of the installed fork, so that a configuration is checked without
importing the trainer. `python -m slurm schema` rewrites it.
"""

import contextlib
import difflib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slurm import ROOT
from slurm.problems import Expected, UserError

FLAGS_FILE = Path(__file__).with_name("flags.json")
TRAINER = "openrlhf.cli.train_ppo_ray"

OWNED = {
    "ckpt.load_enable": "`python -m slurm resume RUN` sets it",
    "ckpt.output_dir": "it is the run folder's model/",
    "ckpt.path": "it is the run folder's checkpoints/",
    "local_rank": "Ray decides where a process runs",
    "logger.groups_path": "it is the run folder's groups/",
    "logger.metrics_path": "it is the run folder's metrics.jsonl",
    "logger.tensorboard_dir": "it is the run folder's tensorboard/",
}
"""Flags that the launcher sets from the run folder; a configuration that gives one is refused, for this reason."""

RUN_NAME = "logger.wandb.run_name"
"""Given by the launcher unless the configuration names one: the trainer's own default is the time of day."""


@dataclass(frozen=True)
class Raw:
    """A value as written: by YAML's rules (a list holds Raws), letter for letter, and the place as file:line."""

    value: Any
    text: str
    where: str

    def __str__(self) -> str:
        match self.value:
            case None:
                return "nothing"
            case list():
                return f"a list of {len(self.value)}"
            case dict():
                return "a mapping"
            case str():
                return f"the text '{self.value}'"
            case _:
                return self.text


@dataclass(frozen=True)
class Flag:
    """One flag: `type` of a value, `nargs` (None: one value; a number, "*" or "+": a list), `choices`, `default`."""

    name: str
    type: Literal["int", "float", "str", "bool"]
    nargs: int | Literal["*", "+"] | None = None
    choices: Sequence[str | int] | None = None
    default: Any = None
    action: Literal["store", "store_true", "store_false"] = "store"

    @property
    def is_switch(self) -> bool:
        return self.action != "store"

    @property
    def expected(self) -> str:
        """What a value must be, as words of an error message."""
        if self.is_switch:
            return "true or false"
        one = {"int": "an integer", "float": "a number", "str": "text", "bool": "true or false"}[self.type]
        if self.choices:
            one = "one of " + ", ".join(map(str, self.choices))
        if self.nargs is None:
            return one
        count = {"*": "any number", "+": "one or more"}.get(str(self.nargs), str(self.nargs))
        return f"a list [..] of {count}, each {one}"

    def read(self, raw: Raw) -> Any:
        """The value that the trainer will have: bool, int, float, str or a list of them. Raises Expected."""
        if self.nargs is None:
            return self._read_one(raw)
        fits = isinstance(raw.value, list) and self.nargs in ("*", "+", len(raw.value))
        if not fits or (self.nargs == "+" and not raw.value):
            raise Expected(self.expected, str(raw))
        items = [self._read_one(item) for item in raw.value]
        for item in items:
            # In a list the command line would take these for the next flag.
            if item == -math.inf or (isinstance(item, str) and item.startswith("-")):
                raise Expected(f"{self.expected}, none beginning with '-' but finite numbers", str(item))
        return items

    def _read_one(self, raw: Raw) -> Any:
        value = raw.value
        boolean = isinstance(value, bool)
        if self.type == "bool" and boolean:
            if self.action == "store_true" and self.default and not value:
                raise Expected("true, which is also the default: the trainer turns it off by another flag", "false")
            return value
        if self.type == "int" and isinstance(value, int) and not boolean and value in (self.choices or (value,)):
            return value
        if self.type == "float" and isinstance(value, int | float) and not boolean:
            with contextlib.suppress(OverflowError):
                if not math.isnan(number := float(value)):
                    return number
        if self.type == "str" and not boolean and value is not None and not isinstance(value, list | dict):
            text = value if isinstance(value, str) else raw.text
            if "\0" not in text and text in (self.choices or (text,)):
                return text
        raise Expected(self.expected, str(raw))

    def arguments(self, value: Any) -> list[str]:
        """The words of the command line that give this flag `value`."""
        if self.is_switch:
            return [f"--{self.name}"] if value else []
        if self.nargs is not None:
            return [f"--{self.name}", *map(_word, value)]
        return [f"--{self.name}={_word(value)}"]


def _word(value: Any) -> str:
    # argparse takes `-1e-05` in a list for a flag, and `-0.00001` for the number that it is.
    if isinstance(value, float) and math.isfinite(value) and value < 0:
        return format(Decimal(repr(value)), "f")
    return str(value)


@cache
def trainer_flags() -> dict[str, Flag]:
    """The installed trainer's flags by name."""
    flags = {name: Flag(name, **row) for name, row in json.loads(FLAGS_FILE.read_text()).items()}
    for name, flag in flags.items():
        if flag.type == "float" and isinstance(flag.default, str):  # JSON has no infinity
            flags[name] = replace(flag, default=float(flag.default))
    return flags


def nearest(name: str, names: Iterable[str]) -> str:
    """Words of an error message: the names most like `name`, or where to find them all."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else "all names are in slurm/flags.json"


def installed_flags(python: str = sys.executable) -> dict[str, dict[str, Any]]:
    """The flags of the fork that `python` has installed, as `flags.json` holds them. Raises UserError without one."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "flags.json")
        command = [python, "-m", TRAINER, "--train.schema_path", str(written)]
        # The flags are the same on every device, and on CPU the fork can be asked for them without a GPU's libraries.
        environment = os.environ | {"DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode or not written.exists():
            last = done.stderr.strip().splitlines()[-1:]
            raise UserError("\n".join((f"{python} has no fork that writes its flags; `make setup` installs it", *last)))
        rows: dict[str, dict[str, Any]] = json.loads(written.read_text())
    for name in {RUN_NAME, *OWNED} & rows.keys():
        rows[name]["default"] = None  # never used, since the launcher gives these; one of them is the clock
    return dict(sorted(rows.items()))


def regenerate() -> list[str]:
    """Rewrite `flags.json` from the installed fork, one flag a line; returns the names that came, went or changed."""
    before, rows = json.loads(FLAGS_FILE.read_text()), installed_flags()
    FLAGS_FILE.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in rows) + "\n}\n"
    )
    return sorted(name for name in before.keys() | rows.keys() if before.get(name) != rows.get(name))
