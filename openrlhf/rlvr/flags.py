"""The fork's flags: declared once, as dataclasses, beside upstream's dotted ones.

A group of settings is a dataclass whose fields have a default and a help text::

    @settings("logger")
    class Metrics:
        metrics_path: str | None = flag(None, "append the metrics of each step to this file, as JSON lines")

which registers ``--logger.metrics_path``. After parsing, ``Metrics.of(args)`` gives the typed values. A class may have
``problems(self, flags)``, which returns what is wrong with its values, by flag; all problems are reported together
before anything is started.
"""

import argparse
import importlib
import json
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin

T = TypeVar("T")
Check = Callable[[dict[str, Any]], list[str]]
"""From all flags, by dotted name, to what is wrong with them."""

# Modules of openrlhf.rlvr that declare settings.
DECLARING = (
    *("advantages", "allocation", "prompts", "ragged", "records", "w_reinforce"),
    *("policy_losses", "acpo", "sapo", "score", "covariance", "fork_tokens", "gtpo", "modulation", "entropy"),
    *("statistics", "policy_metrics", "evaluation", "metrics"),
)

_GROUPS: dict[type, str] = {}
_CHOICES: dict[str, tuple[str, ...]] = {}
_CHECKS: list[Check] = []


def flag(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    """A field that is also a flag; lists take one or more values, booleans are switches that are off by default."""
    made = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**made, metadata={"help": help, "choices": choices})


def settings(prefix: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: make a frozen dataclass and register its fields as ``--prefix.name``."""

    def register(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True)(cls)
        made.of = classmethod(_of)  # type: ignore[attr-defined]
        _GROUPS[made] = prefix
        return made

    return register


def extend_choices(flag_name: str, *values: str) -> None:
    """Let one of upstream's flags take further values."""
    _CHOICES[flag_name] = (*_CHOICES.get(flag_name, ()), *values)


def start_up_check(check: Check) -> Check:
    """Decorator: let a function look for faults between settings of several groups before anything is started."""
    _CHECKS.append(check)
    return check


def _of(cls: type[T], args: Any) -> T:
    """The settings in parsed arguments, in upstream's nested form."""
    node = args
    for part in _GROUPS[cls].split("."):
        node = getattr(node, part)
    return cls(**{item.name: getattr(node, item.name) for item in fields(cls)})  # type: ignore[arg-type]


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Add the fork's flags to upstream's parser, parse, and check the fork's settings.

    Returns:
        The flat namespace that upstream goes on with.

    Raises:
        SystemExit: bad flags, or after ``--train.schema_path`` has written the schema.
    """
    declaring = {importlib.import_module(f"openrlhf.rlvr.{module}").__name__ for module in DECLARING}
    groups = {cls: prefix for cls, prefix in _GROUPS.items() if cls.__module__ in declaring}
    for cls, prefix in groups.items():
        for item in fields(cls):
            _add(parser, prefix, item)
    for action in parser._actions:
        if added := _CHOICES.get(action.dest):
            action.choices = (*(action.choices or ()), *added)
    parser.add_argument(
        "--train.schema_path",
        type=str,
        default=None,
        help="write every flag's type, choices and default here, and exit",
    )
    args = parser.parse_args(argv)
    path = vars(args).pop("train.schema_path")
    if path is not None:
        with open(path, "w") as handle:
            json.dump(schema(parser), handle, indent=1, sort_keys=True)
            handle.write("\n")
        raise SystemExit(0)
    problems = [problem for cls, prefix in groups.items() for problem in _problems(cls, prefix, vars(args))]
    problems += [problem for check in _CHECKS for problem in check(vars(args))]
    if problems:
        raise SystemExit("bad flags:\n  " + "\n  ".join(problems))
    return args


def schema(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Types, choices and defaults of all flags, by dotted name; no help texts."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.dest == "train.schema_path":
            continue
        name = max(action.option_strings, key=len).removeprefix("--")
        kind = type(action).__name__.removeprefix("_").removesuffix("Action").lower()
        switch = kind in ("storetrue", "storefalse")
        found[name] = {
            "type": "bool" if switch else getattr(action.type or str, "__name__", "str"),
            "nargs": None if switch else action.nargs,
            "choices": list(action.choices) if action.choices else None,
            "default": _plain(action.default),
            "action": {"storetrue": "store_true", "storefalse": "store_false"}.get(kind, "store"),
        }
    return found


def _plain(value: Any) -> Any:
    """A default as JSON has it: infinity is no number there."""
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _add(parser: argparse.ArgumentParser, prefix: str, item: Any) -> None:
    default = item.default_factory() if item.default is MISSING else item.default
    options: dict[str, Any] = {"default": default, "help": item.metadata["help"]}
    kind, many = _kind(item.type)
    if kind is bool:
        options["action"] = "store_true"
    else:
        options |= {"type": kind, "choices": item.metadata["choices"], "nargs": "+" if many else None}
    parser.add_argument(f"--{prefix}.{item.name}", **options)


def _kind(annotation: Any) -> tuple[type, bool]:
    """The type of one value, and whether the flag takes several; ``X | None`` is X with None as its default."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is list:
        return get_args(annotation)[0], True
    return annotation, False


def _problems(cls: type, prefix: str, flags: dict[str, Any]) -> list[str]:
    check = getattr(cls, "problems", None)
    own = cls(**{item.name: flags[f"{prefix}.{item.name}"] for item in fields(cls)})
    return check(own, flags) if check else []
