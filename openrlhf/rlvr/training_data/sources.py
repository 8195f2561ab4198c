"""Rows of local parquet and JSON files and of data sets on the Hugging Face hub, with the places where they stand."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SUFFIXES = (".parquet", ".json", ".jsonl")
BATCH = 8192
"""Rows of a parquet file or a hub's data set in memory at once."""


class InputError(ValueError):
    """Something is wrong with a file, a row or a setting; the message says where and what to do."""


@dataclass(frozen=True)
class Hub:
    """Which part of a data set on the hub."""

    config: str | None = None
    split: str = "train"
    revision: str | None = None


@dataclass(frozen=True)
class Input:
    """Data as it was given.

    Attributes:
        name: for messages.
        origin: what it is, for a manifest.
        rows: from top-level columns (None: all) to places, such as "row 7", and rows.
    """

    name: str
    origin: dict[str, Any]
    rows: Callable[[Sequence[str] | None], Iterator[tuple[str, Row]]]


def open_input(name: str, hub: Hub | None = None) -> Input:
    """A local parquet file, JSON array or JSON lines, or else a folder or name that the `datasets` library can load.

    Parquet files, JSON lines and the hub are read in pieces; a JSON array is read as a whole.

    Raises:
        InputError: there is no such file or data set, or it cannot be read.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise InputError(f"{name}: expected a file that ends in {', '.join(SUFFIXES)}, or the name of a data set")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        origin = {"file": name, "bytes": path.stat().st_size, "sha256": digest}
        read = _parquet_rows if path.suffix == ".parquet" else _json_rows
        return Input(name, origin, lambda columns: read(path, columns))
    if path.suffix in SUFFIXES or not (path.is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", name)):
        raise InputError(f"{name}: no such file, nor a data set's name on the Hugging Face hub (OWNER/NAME)")
    return _from_hub(name, hub or Hub())


def cell(row: Row, key: str, where: str) -> Any:
    """The value at a key, which may lead through nested objects: ``reward_model.ground_truth``.

    Raises:
        InputError: there is none, or it is null.
    """
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            there = f"there are {', '.join(value)}" if isinstance(value, dict) else f"{value!r:.60} holds no keys"
            raise InputError(f"{where}: '{key}' is missing at '{part}': {there}")
        value = value[part]
    if value is None:
        raise InputError(f"{where}: '{key}' is null")
    return value


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            known = _known(str(path), columns, file.schema_arrow.names)
            yield from _arrow_rows(file.iter_batches(BATCH, columns=known))
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: cannot be read as a parquet file: {error}") from error


def _from_hub(name: str, hub: Hub) -> Input:
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, hub.config, revision=hub.revision)
        builder.download_and_prepare()
        table = builder.as_dataset(hub.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"{name}: the data set cannot be loaded: {' '.join(str(error).split())}. Without a way to the Hugging Face "
            "hub, download its parquet file elsewhere and give the path of that file"
        ) from error
    # The library's hash of a data set on the hub is its commit there.
    origin = {"name": name, **vars(hub), "hash": builder.hash, "rows": len(table)}

    def rows(columns: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
        chosen = table.select_columns(_known(name, columns, table.column_names))
        return _arrow_rows(chosen.with_format("arrow").iter(BATCH))

    return Input(name, origin, rows)


def _known(name: str, columns: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    for column in columns or ():
        if column not in there:
            raise InputError(f"{name}: has no column '{column}'; there are {', '.join(there)}")
    return list(there if columns is None else dict.fromkeys(columns))


def _arrow_rows(batches: Iterator[Any]) -> Iterator[tuple[str, Row]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def _json_rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        try:
            is_array = next((line for line in file if line.strip()), "").lstrip().startswith("[")
            file.seek(0)
            values = enumerate(json.load(file), 1) if is_array else _json_lines(path, file)
            for number, value in values:
                place = f"{'row' if is_array else 'line'} {number}"
                if not isinstance(value, dict):
                    raise InputError(f"{path}: {place}: expected an object {{...}}, not {type(value).__name__}")
                yield place, value
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: is not UTF-8 text: {error}") from error
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: line {error.lineno}: is not JSON: {error.msg}") from error


def _json_lines(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}: line {number}: is not JSON: {error.msg}") from error
