"""What a run reads: models, prompts and reward functions, looked at before anything is started.

A value that begins with `./`, `../`, `/` or `~`, names a data or Python file, lies under `build/` or exists is a
path, and relative ones are meant from the repository's root. Anything else is a name on the Hugging Face hub.
"""

import ast
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm import ROOT
from slurm.config import Config, Setting, shown
from slurm.problems import Problem, UserError

MODELS = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path")
DATA = ("data.prompt_dataset", "eval.dataset")
CODE = {"reward.remote_url": "reward_func", "train.agent_func_path": "AgentExecutor"}
"""Keys of Python files, and the name that the trainer looks up in each."""

TABLES = (".json", ".jsonl")
FILES = (*TABLES, ".csv", ".parquet", ".arrow", ".py")
READ_WHOLE = 1 << 28
"""Bytes; a larger file is looked at by the trainer only, since counting it would hold up the start."""


@dataclass(frozen=True)
class Facts:
    """A prompt file in numbers: the rows that `data.max_samples` lets in, how many of each `datasource`, and the
    SHA-256 of its bytes."""

    path: str
    rows: int
    by_source: dict[str, int]
    sha256: str


@dataclass
class Inputs:
    """What was found: faults, warnings, and facts by key for the prompt files that are JSON."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, list[Facts]] = field(default_factory=dict)

    def rows(self, config: Config, key: str) -> int | None:
        """Rows that the trainer will use of `key`, if all its files were counted."""
        pieces = _pieces(config[key])
        counted = self.facts.get(key, [])
        known = pieces and len(counted) == len(pieces) and not config["data.prompt_probs"]
        return min(sum(facts.rows for facts in counted), config["data.max_samples"]) if known else None

    def steps(self, config: Config) -> int | None:
        """Training steps of the whole run, if they can be known: filtering decides how many prompts a step takes."""
        rows = self.rows(config, "data.prompt_dataset")
        if not rows or config["algo.dynamic_filtering_enable"]:
            return None
        drawn = min(config["rollout.vllm_generate_batch_size"] or math.inf, config["rollout.batch_size"])
        return math.ceil(rows / drawn) * int(config["train.num_episodes"])


def _pieces(value: str | None) -> list[str]:
    """The flags of models, data and code take several, separated by commas."""
    return [piece.strip() for piece in value.split(",")] if value else []


def _is_path(key: str, piece: str) -> bool:
    if "://" in piece or key in CODE:
        return "://" not in piece
    marked = piece.startswith(("./", "../", "/", "~", "build/")) or piece.endswith(FILES)
    return marked or (ROOT / piece).exists()


def absolute(config: Config) -> Config:
    """The same configuration with every path in it absolute."""
    settings = dict(config.settings)
    for key in (*MODELS, *DATA, *CODE):
        if key in settings and isinstance(settings[key].value, str):
            pieces = [_absolute(key, piece) for piece in _pieces(settings[key].value)]
            settings[key] = Setting(",".join(pieces), settings[key].where)
    return replace(config, settings=settings)


def _absolute(key: str, piece: str) -> str:
    # `path@folder` names a folder inside a data set; the trainer splits it off itself.
    path, at, inside = piece.partition("@")
    return os.path.abspath(ROOT / Path(path).expanduser()) + at + inside if _is_path(key, path) else piece


def look_at_inputs(config: Config, to_be_made: Path | None = None) -> Inputs:
    """Look at every input of an `absolute` configuration, except below `to_be_made`, which a preparation will fill."""
    inputs = Inputs()
    prompts: dict[str, Counter[str]] = {}
    identities: dict[str, tuple[Path, str]] = {}
    for key in (*MODELS, *DATA, *CODE):
        for piece in _pieces(config[key]):
            path = Path(piece.partition("@")[0])
            if to_be_made and path.is_relative_to(to_be_made):
                continue
            try:
                if not path.is_absolute():
                    _look_at_name(config, key, piece)
                elif not path.exists():
                    raise UserError(f"no such file or folder: {shown(path)}")
                elif key in CODE:
                    _look_at_code(path, CODE[key])
                elif key in MODELS:
                    _look_at_model(path)
                elif path.suffix in TABLES and path.stat().st_size <= READ_WHOLE:
                    placed = list(_read_rows(path, config, key))[: config["data.max_samples"]]
                    if not placed:
                        raise UserError(f"{shown(path)}: holds no rows")
                    rows = [row for _, row in placed]
                    inputs.warnings += _blank_labels(path, rows, config["data.label_key"])
                    if key == "data.prompt_dataset":
                        _look_for_duplicates(path, placed, config, identities)
                    inputs.facts.setdefault(key, []).append(_facts(path, rows))
                    prompts.setdefault(key, Counter()).update(_text(row[config["data.input_key"]]) for row in rows)
            except UserError as error:
                inputs.problems.append(Problem(config.where(key), key, str(error)))
    inputs.warnings += _warnings(config, inputs, prompts)
    return inputs


def _look_at_name(config: Config, key: str, name: str) -> None:
    if "://" in name or not config.launch.offline:
        return
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    kind = "models" if key in MODELS else "datasets"
    if not (cache / f"{kind}--{name.replace('/', '--')}").is_dir():
        raise UserError(
            f"'{name}' is neither a path below {ROOT} nor in the Hugging Face cache {cache}; download it there, "
            "give a path, or set launch.offline: false"
        )


def _look_at_model(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise UserError(f"{shown(path)} is not a model: a folder with config.json is expected")


def _look_at_code(path: Path, name: str) -> None:
    if path.suffix != ".py":
        raise UserError(f"{shown(path)} is not a Python file (.py)")
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{shown(path)}:{error.lineno}: not Python: {error.msg}") from error
    bound = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if name not in bound:
        raise UserError(f"{shown(path)} defines no `{name}`, which the trainer calls")


def _read_rows(path: Path, config: Config, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSON array or of JSON lines and their places, each with the keys that the configuration names."""
    keys = ["data.input_key", "data.label_key", *(["data.id_key"] if key == "data.prompt_dataset" else [])]
    keys = [key for key in keys if config[key]]
    for place, row in _json_rows(path):
        if not isinstance(row, dict):
            raise UserError(f"{shown(path)}: {place} is not an object {{..}} but {type(row).__name__}")
        for key in keys:
            if fault := _fault_of_cell(row, config[key], key):
                raise UserError(f"{shown(path)}: {place}: '{config[key]}' ({key}) is {fault}")
        yield place, row


def _fault_of_cell(row: dict[str, Any], name: str, key: str) -> str | None:
    value = row.get(name)
    if value is None:
        return "null there" if name in row else f"missing; there are {', '.join(row)}"
    if isinstance(value, bool) or (key == "data.id_key" and isinstance(value, list | dict)):
        expected = "a prompt" if key == "data.input_key" else "text or a number"
        return f"{json.dumps(value, ensure_ascii=False)[:40]} there: expected {expected}"
    return "empty there" if key != "data.label_key" and _is_blank(value) else None


def _look_for_duplicates(
    path: Path, placed: list[tuple[str, dict[str, Any]]], config: Config, seen: dict[str, tuple[Path, str]]
) -> None:
    """Raises UserError if two prompts have one identity, by which samples are counted and shared out; `seen` tells
    where those of the files before stand, and is added to."""
    if not config["algo.allocation.strategy"] or config["algo.allocation.duplicates"] == "merge":
        return
    by_id = config["data.id_key"]
    columns = ("data.input_key", "data.label_key", "data.image_key")
    names = [by_id] if by_id else [config[key] for key in columns if config[key]]
    for place, row in placed:
        if len(seen) == config["data.max_samples"]:
            return
        held = [name for name in names if name in row]
        identity = "\0".join(_text(row[name]) for name in held)
        if identity in seen:
            file, first = seen[identity]
            what = f"'{by_id}' (data.id_key) {row[by_id]}" if by_id else " and ".join(f"'{name}'" for name in held)
            other = first if file == path else f"{shown(file)}: {first}"
            raise UserError(
                f"{shown(path)}: {place} has the {what} of {other}, and their samples could not be told apart: remove "
                "one of them, name a column that tells them apart by data.id_key, or write algo.allocation.duplicates: "
                "merge to count them as one prompt"
            )
        seen[identity] = (path, place)


def _is_blank(value: Any) -> bool:
    return value == [] or (isinstance(value, str) and not value.strip())


def _blank_labels(path: Path, rows: list[dict[str, Any]], name: str | None) -> Iterator[str]:
    """A warning of labels that no answer can match. Raises UserError if all of them are such."""
    blank = [number for number, row in enumerate(rows, 1) if name and _is_blank(row[name])]
    if len(blank) == len(rows):
        raise UserError(f"{shown(path)}: '{name}' (data.label_key) is empty in every row")
    if blank:
        listed = ", ".join(map(str, blank[:5])) + ", .." * (len(blank) > 5)
        yield f"{shown(path)}: '{name}' (data.label_key) is empty in row {listed}: no answer there can be right"


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        try:
            lines = not file.read(1024).lstrip().startswith("[")
            file.seek(0)
            if lines:
                yield from (
                    (place, _parse(line, path, place)) for place, line in _numbered(file, "line") if line.strip()
                )
            else:
                yield from _numbered(_parse(file.read(), path, "the array"), "row")
        except UnicodeDecodeError as error:
            raise UserError(f"{shown(path)}: not UTF-8 text: {error.reason}") from error


def _numbered(items: Iterable[Any], word: str) -> Iterator[tuple[str, Any]]:
    return ((f"{word} {number}", item) for number, item in enumerate(items, 1))


def _parse(text: str, path: Path, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 40].strip()
        raise UserError(f"{shown(path)}: {place}: not JSON ({error.msg}), near '{near}'") from error
    except RecursionError as error:
        raise UserError(f"{shown(path)}: {place}: nested too deeply for a prompt and its label") from error


def _facts(path: Path, rows: list[dict[str, Any]]) -> Facts:
    by_source = Counter(str(row.get("datasource", "default")) for row in rows)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return Facts(str(path), len(rows), dict(sorted(by_source.items())), digest.hexdigest())


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _warnings(config: Config, inputs: Inputs, prompts: dict[str, Counter[str]]) -> Iterator[str]:
    training, validation = (prompts.get(key, Counter()) for key in DATA)
    shared = sum(count for prompt, count in validation.items() if prompt in training)
    if shared:
        yield f"{shared} of {validation.total()} validation prompts are training prompts too: the gain will flatter"
    rows, batch = inputs.rows(config, "data.prompt_dataset"), config["rollout.batch_size"]
    if rows and batch > 0 and rows % batch:
        yield f"{rows} prompts are no multiple of rollout.batch_size {batch}: an episode's last step has {rows % batch}"
