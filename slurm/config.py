"""The one reader of configurations.

A configuration is YAML 1.2 (so `off` is text and `1e-3` a number) with the trainer's dotted flags as flat keys:

    include: [../models/tiny.yaml, ../methods/grpo.yaml]   # read first, relative to this file
    train.batch_size: 128                                  # later wins over earlier, the command line over all
    actor.entropy_coef: null                               # leaves the flag out, whatever an included file says
    launch.device: cpu                                     # `launch.*` is for the launcher: see Launch

Relative paths in values are meant from the repository's root, not from the file, so that a value means the same
wherever it stands. Every fault of a configuration is reported at once, with file, line and key.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from slurm import ROOT
from slurm.problems import ConfigError, Expected, Problem, UserError
from slurm.schema import OWNED, Flag, Raw, nearest, trainer_flags

COMMAND_LINE = "command line"
DEFAULT = "default"
WANDB_KEY = "logger.wandb.key"
_SCALARS = YAML(typ="safe", pure=True).constructor


@dataclass(frozen=True)
class Launch:
    """What the launcher itself is told, by the keys `launch.*`.

    device: where the trainer computes. prepare: made before the run if it is not there yet (`tiny_task`: the small
    model and its arithmetic in build/tiny). offline: models and data come from local paths or the Hugging Face cache.
    """

    device: Literal["cpu", "cuda"] = "cuda"
    prepare: Literal["tiny_task"] | None = None
    offline: bool = True


LAUNCH_FLAGS = {
    flag.name: flag
    for flag in (
        Flag("launch.device", "str", choices=("cpu", "cuda"), default=Launch.device),
        Flag("launch.prepare", "str", choices=("tiny_task",), default=Launch.prepare),
        Flag("launch.offline", "bool", default=Launch.offline),
    )
}


@dataclass(frozen=True)
class Setting:
    """A value that a configuration gives, and where it does."""

    value: Any
    where: str


@dataclass(frozen=True)
class Config:
    """A resolved configuration: every key that is set, checked against the flags; `config[key]` knows defaults too."""

    name: str
    settings: Mapping[str, Setting]

    def __getitem__(self, key: str) -> Any:
        return self.settings[key].value if key in self.settings else known_flags()[key].default

    @cached_property
    def launch(self) -> Launch:
        return Launch(**{field.name: self[f"launch.{field.name}"] for field in fields(Launch)})

    def where(self, key: str) -> str:
        """The place that sets `key`."""
        return self.settings[key].where if key in self.settings else DEFAULT

    def problem(self, key: str, message: str) -> Problem:
        """A fault of what `key` is set to."""
        value = "not set" if self[key] is None else self[key]
        return Problem(self.where(key), f"{key} ({value})", message)

    def arguments(self) -> list[str]:
        """The trainer's command line, in order of name."""
        flags = trainer_flags()
        given = sorted(key for key in self.settings if key in flags)
        return [word for key in given for word in flags[key].arguments(self[key])]

    def dump(self) -> str:
        """The configuration as one YAML file without includes, each line saying where its value came from."""
        document = CommentedMap()
        for key, setting in sorted(self.settings.items()):
            document[key] = _dumped(setting.value)
            document.yaml_add_eol_comment(setting.where, key, column=60)
        writer, text = YAML(), io.StringIO()
        writer.width = 1 << 20  # one line each: nothing may wrap
        writer.dump(document, text)
        return text.getvalue()


def _dumped(value: Any) -> Any:
    if isinstance(value, list):
        items = CommentedSeq(map(_dumped, value))
        items.fa.set_flow_style()
        return items
    return DoubleQuotedScalarString(value) if isinstance(value, str) and not value.isprintable() else value


def known_flags() -> dict[str, Flag]:
    """Every key that a configuration may hold, `include` aside."""
    return trainer_flags() | LAUNCH_FLAGS


def read_config(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """Resolve `recipe` with `overrides` (`key=value`). Raises ConfigError with every fault found."""
    problems: list[Problem] = []
    entries = _entries_of_file(recipe, (), problems)
    entries += _entries_of_overrides(overrides, problems)
    settings: dict[str, Setting] = {}
    for key, raw in entries:
        flag = known_flags().get(key)
        if fault := _fault_of_key(key, raw, flag):
            problems.append(Problem(raw.where, key, fault))
        elif raw.value is None:
            settings.pop(key, None)
        elif flag:
            try:
                settings[key] = Setting(flag.read(raw), raw.where)
            except Expected as error:
                problems.append(Problem(raw.where, key, str(error)))
    if problems:
        raise ConfigError(problems)
    return Config(recipe.stem, settings)


def _fault_of_key(key: str, raw: Raw, flag: Flag | None) -> str | None:
    if key in OWNED:
        return f"the launcher owns this flag ({OWNED[key]}): leave it out"
    if key == WANDB_KEY and raw.value not in (None, "environment"):
        return (
            "a secret would stand in the run folder and in the list of processes: "
            f"export WANDB_API_KEY and write `{WANDB_KEY}: environment`"
        )
    if isinstance(raw.value, dict):
        flat = [name for name in known_flags() if name.startswith(f"{key}.")]
        if flat:
            return f"keys are flat: write {flat[0]}: ... and not one mapping in another"
    if flag is None:
        return f"no such flag; {nearest(key, known_flags())}"
    return None


def _entries_of_file(path: Path, trail: tuple[Path, ...], problems: list[Problem]) -> list[tuple[str, Raw]]:
    """Keys and values of `path`, those of its includes first. Raises UserError if the file cannot be read at all."""
    name, trail = shown(path), (*trail, path.resolve())
    try:
        node = _compose(path.read_text(encoding="utf-8"), name)
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {name}: not UTF-8 text ({error.reason})") from error
    except ConfigError as error:
        problems += error.problems
        return []
    included: list[tuple[str, Raw]] = []
    own: list[tuple[str, Raw]] = []
    for key, raw in _entries_of_node(node, name, problems):
        if key != "include":
            own.append((key, raw))
            continue
        for item in raw.value if isinstance(raw.value, list) else [raw]:
            try:
                included += _entries_of_include(item, path.parent, trail, problems)
            except UserError as error:
                problems.append(Problem(item.where, key, str(error)))
    return included + own


def _entries_of_include(
    item: Raw, folder: Path, trail: tuple[Path, ...], problems: list[Problem]
) -> list[tuple[str, Raw]]:
    if not isinstance(item.value, str):
        raise Expected("a file or a list of files", str(item))
    real = (folder / item.value).resolve()
    if real in trail:
        circle = " -> ".join(map(shown, (*trail[trail.index(real) :], real)))
        raise UserError(f"files include each other in a circle: {circle}")
    return _entries_of_file(folder / item.value, trail, problems)


def _entries_of_node(node: Node | None, name: str, problems: list[Problem]) -> Iterator[tuple[str, Raw]]:
    if node is None:
        return
    if not isinstance(node, MappingNode):
        problems.append(Problem(_place(name, node), "(whole file)", "expected lines of the form `key: value`"))
        return
    first: dict[str, str] = {}
    for key_node, value_node in node.value:
        where = _place(name, key_node)
        if not isinstance(key_node, ScalarNode):
            problems.append(Problem(where, "(key)", "expected the name of a flag, found a list or a mapping"))
            continue
        key = str(key_node.value)
        if key in first:
            problems.append(Problem(where, key, f"given twice, first at {first[key]}"))
        first.setdefault(key, where)
        yield key, _raw(value_node, name, where)


def _entries_of_overrides(overrides: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, Raw]]:
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            problems.append(Problem(COMMAND_LINE, override, "expected key=value"))
            continue
        flag = known_flags().get(key)
        if not text.strip():
            quoted = f", `{key}=\"''\"` gives it empty text" if flag and flag.type == "str" else ""
            fault = f"the value is empty: `{key}=null` leaves the flag out{quoted}"
            problems.append(Problem(COMMAND_LINE, key, fault))
            continue
        try:
            node = _compose(text, COMMAND_LINE)
        except ConfigError:
            node = None
        raw = _raw(node, COMMAND_LINE, COMMAND_LINE) if node else Raw(text, text, COMMAND_LINE)
        if flag and flag.type == "str" and flag.nargs is None and isinstance(raw.value, dict | list):
            raw = Raw(text, text, COMMAND_LINE)  # `Question: {}` is a template here, whatever YAML makes of it
        yield key, raw


def _compose(text: str, name: str) -> Node | None:
    """The syntax tree of a YAML text. Raises ConfigError with the one fault that stopped it."""
    try:
        return YAML(typ="safe", pure=True).compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.context_mark or error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError([Problem(f"{name}{line}", "(syntax)", f"not YAML: {words}")]) from error
    except YAMLError as error:
        raise ConfigError([Problem(name, "(syntax)", f"not YAML: {error}")]) from error
    except RecursionError as error:
        raise ConfigError([Problem(name, "(syntax)", "nested too deeply: expected `key: value` lines")]) from error


def _raw(node: Node, name: str, where: str) -> Raw:
    if isinstance(node, SequenceNode):
        return Raw([_item(item, name) for item in node.value], "[..]", where)
    if isinstance(node, ScalarNode):
        try:
            value = _SCALARS.construct_object(node)
        except (YAMLError, ValueError):
            value = node.value
        return Raw(value, str(node.value), where)
    return Raw({}, "{..}", where)


def _item(node: Node, name: str) -> Raw:
    where = _place(name, node)
    if isinstance(node, SequenceNode):
        # No flag takes a list in a list, and this one may hold itself: what is in it is not looked at.
        return Raw([Raw(None, "", where)] * len(node.value), "[..]", where)
    return _raw(node, name, where)


def _place(name: str, node: Node) -> str:
    return name if name == COMMAND_LINE else f"{name}:{node.start_mark.line + 1}"


def shown(path: Path) -> str:
    """A file's name for the user: from the repository's root where it lies below it, else as short as it gets."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else str(absolute)
