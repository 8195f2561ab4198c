"""Reads the queue: ``series.toml`` names groups and patches in order, each patch is one TOML file."""

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ast_grep_py import SgRoot

from patches.errors import QueueError

ROOT = Path(__file__).resolve().parent
REPO = ROOT.parent
PACKAGE = "openrlhf"

SERIES_KEYS = {"upstream", "group"}
GROUP_KEYS = {"name", "package", "purpose", "patches", "leans_on"}
PATCH_KEYS = {"purpose", "drop_when", "edit"}
EDIT_KEYS = {"module", "count", "counts", "leave", "within", "find", "replace", "import"}


@dataclass(frozen=True)
class Edit:
    """One rewrite: every match of ``find`` becomes ``replace``, and the number of matches is part of the claim.

    ``find`` is Python with ast-grep's metavariables (``$X`` one node, ``$$$ARGS`` any number of them).
    ``counts`` maps module paths below the package to the exact number of matches. ``leave`` maps modules where the
    pattern is left alone to the reason; an edit with ``leave`` speaks for the whole package, so that a match in a
    module that neither table names stops the build.
    """

    find: str
    replace: str
    counts: dict[str, int]
    leave: dict[str, str] | None
    within: str | None
    imports: tuple[str, ...]

    @property
    def everywhere(self) -> bool:
        return self.leave is not None


@dataclass(frozen=True)
class Patch:
    """A named edit or set of edits with its reason and the condition under which it can be dropped."""

    group: str
    name: str
    purpose: str
    drop_when: str
    edits: tuple[Edit, ...]

    @property
    def title(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass(frozen=True)
class Group:
    """Patches that are built together, with the package folder that holds their own modules.

    ``leans_on`` names upstream definitions that the patches and modules need without editing or importing them.
    """

    name: str
    package: str
    purpose: str
    patches: tuple[Patch, ...]
    leans_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """The whole queue for one pinned upstream release."""

    upstream: str
    groups: tuple[Group, ...]

    def without(self, names: list[str]) -> "Series":
        """The series up to the first group that is left out; each group may need all that come before it.

        Raises:
            QueueError: there is no such group, a group that stays comes after one that does not, or none would stay.
        """
        have = [group.name for group in self.groups]
        if unknown := sorted(set(names) - set(have)):
            raise QueueError(f"--without {', '.join(unknown)}: no such group; the series has {', '.join(have)}")
        kept = tuple(group for group in self.groups if group.name not in names)
        if not kept:
            raise QueueError(f"--without {', '.join(have)}: leaves no group; {have[0]!r} is needed by all")
        for name in have[: len(kept)]:
            if name in names:
                later = ", ".join(group.name for group in kept[have.index(name) :])
                raise QueueError(
                    f"--without {name}: the later groups need it ({later}); only the last groups can be left out"
                )
        return Series(self.upstream, kept)

    @property
    def patches(self) -> tuple[Patch, ...]:
        return tuple(patch for group in self.groups for patch in group.patches)


def load_series(root: Path = ROOT) -> Series:
    """Read ``series.toml`` and every patch that it names.

    Raises:
        QueueError: a file is missing, is not TOML, has an unknown, missing or mistyped key, or is not named in the
            series.
    """
    path = root / "series.toml"
    data = _read(path)
    _known(data, SERIES_KEYS, f"{path}", "the series")
    groups = tuple(_load_group(entry, path) for entry in _tables(data, "group", path))
    _once([group.name for group in groups], f"{path}: group")
    return Series(_string(data, "upstream", f"{path}"), groups)


def _load_group(data: dict[str, Any], series: Path) -> Group:
    where = f"{series}: group {data.get('name', '')!r}"
    _known(data, GROUP_KEYS, where, "a group")
    name = _string(data, "name", where)
    folder = series.parent / name
    listed = _strings(data, "patches", where)
    _once(listed, f"{where}: patch")
    if stray := sorted({path.stem for path in folder.glob("*.toml")} - set(listed)):
        raise QueueError(f"{folder}: {', '.join(stray)}: not named in series.toml; add or delete the file")
    return Group(
        name,
        package=_string(data, "package", where),
        purpose=_string(data, "purpose", where),
        patches=tuple(_load_patch(name, patch, folder / f"{patch}.toml") for patch in listed),
        leans_on=_strings(data, "leans_on", where),
    )


def _load_patch(group: str, name: str, path: Path) -> Patch:
    data = _read(path)
    _known(data, PATCH_KEYS, f"{path}", "a patch")
    edits = tuple(
        _load_edit(entry, f"{path}: edit {number}") for number, entry in enumerate(_tables(data, "edit", path), 1)
    )
    return Patch(group, name, _string(data, "purpose", f"{path}"), _string(data, "drop_when", f"{path}"), edits)


def _load_edit(data: dict[str, Any], where: str) -> Edit:
    _known(data, EDIT_KEYS, where, "an edit")
    if isinstance(data.get("import"), str):
        data["import"] = [data["import"]]
    return Edit(
        find=_pattern(data, where),
        replace=_string(data, "replace", where),
        counts=_counts(data, where),
        leave=_leave(data, where),
        within=_string(data, "within", where) if "within" in data else None,
        imports=tuple(_import(statement, where) for statement in _strings(data, "import", where)),
    )


def _counts(data: dict[str, Any], where: str) -> dict[str, int]:
    if ("module" in data) == ("counts" in data):
        raise QueueError(f"{where}: an edit names either 'module' (with 'count') or 'counts'")
    if "counts" in data and "count" in data:
        raise QueueError(f"{where}: 'count' goes with 'module'; 'counts' has a number for each module")
    counts = data["counts"] if "counts" in data else {_string(data, "module", where): data.get("count", 1)}
    if not isinstance(counts, dict) or not counts:
        raise QueueError(f"{where}: counts = {counts!r}: must be a table of module paths with a number each")
    for module, count in counts.items():
        if type(count) is not int or count < 1:
            raise QueueError(f"{where}: {module}: count = {count!r}: must be a whole number of at least 1")
    return counts


def _leave(data: dict[str, Any], where: str) -> dict[str, str] | None:
    leave = data.get("leave")
    if leave is not None and not isinstance(leave, dict):
        raise QueueError(f"{where}: leave = {leave!r}: must be a table of module paths with a reason each")
    return leave if leave is None else {module: _string(leave, module, f"{where}: leave") for module in leave}


def _pattern(data: dict[str, Any], where: str) -> str:
    find = _string(data, "find", where)
    # A letter in place of the mark of metavariables makes a pattern plain syntax.
    root = SgRoot(find.replace("$", "µ"), "python").root()
    if len(root.children()) != 1 or root.find(kind="ERROR") is not None:
        raise QueueError(f"{where}: find = {find!r}: must be one expression or one statement of Python")
    return find


def _import(statement: str, where: str) -> str:
    try:
        body = ast.parse(statement).body
    except SyntaxError:
        body = []
    if len(body) != 1 or not isinstance(body[0], ast.Import | ast.ImportFrom):
        raise QueueError(f"{where}: import = {statement!r}: must be one import statement")
    return ast.unparse(body[0])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QueueError(f"{path}: no such file, but the series names it") from None
    except UnicodeDecodeError as error:
        raise QueueError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise QueueError(f"{path}: not TOML: {error}") from None


def _known(data: dict[str, Any], keys: set[str], where: str, what: str) -> None:
    if unknown := sorted(set(data) - keys):
        raise QueueError(f"{where}: unknown key {unknown[0]!r}; {what} has {', '.join(sorted(keys))}")


def _once(names: list[str] | tuple[str, ...], where: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise QueueError(f"{where} {twice[0]!r} is named twice; once is enough")


def _require(data: dict[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise QueueError(f"{where}: missing key {key!r}")
    return data[key]


def _tables(data: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    value = _require(data, key, f"{path}")
    if isinstance(value, dict):
        raise QueueError(f"{path}: [{key}] is a single table; write [[{key}]], there may be several")
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise QueueError(f"{path}: {key} = {value!r}: must be one or more tables [[{key}]]")
    return value


def _string(data: dict[str, Any], key: str, where: str) -> str:
    value = _require(data, key, where)
    if not isinstance(value, str) or not value.strip():
        raise QueueError(f"{where}: {key} = {value!r}: must be a string that is not empty")
    return value.strip()


def _strings(data: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise QueueError(f"{where}: {key} = {value!r}: must be a list of strings")
    return tuple(value)
