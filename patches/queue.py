"""Reads the queue: ``series.toml`` names groups and patches in order, each patch is one TOML file."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches.errors import QueueError

ROOT = Path(__file__).resolve().parent
REPO = ROOT.parent
PACKAGE = "openrlhf"

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
        unknown = set(names) - {group.name for group in self.groups}
        if unknown:
            have = ", ".join(group.name for group in self.groups)
            raise QueueError(f"--without {', '.join(sorted(unknown))}: no such group; the series has {have}")
        return Series(self.upstream, tuple(group for group in self.groups if group.name not in names))

    @property
    def patches(self) -> tuple[Patch, ...]:
        return tuple(patch for group in self.groups for patch in group.patches)


def load_series(root: Path = ROOT) -> Series:
    """Read ``series.toml`` and every patch that it names.

    Raises:
        QueueError: a file is missing, is not TOML, has an unknown or missing key, or is not named in the series.
    """
    data = _read(root / "series.toml")
    groups = []
    for entry in _require(data, "group", root / "series.toml"):
        name = _require(entry, "name", root / "series.toml")
        folder = root / name
        listed = entry.get("patches", [])
        present = {path.stem for path in folder.glob("*.toml")}
        if stray := sorted(present - set(listed)):
            raise QueueError(f"{folder}: {', '.join(stray)}: not named in series.toml; add or delete the file")
        patches = tuple(_load_patch(name, patch, folder / f"{patch}.toml") for patch in listed)
        groups.append(Group(name, entry["package"], entry["purpose"], patches, tuple(entry.get("leans_on", []))))
    return Series(_require(data, "upstream", root / "series.toml"), tuple(groups))


def _load_patch(group: str, name: str, path: Path) -> Patch:
    data = _read(path)
    if unknown := sorted(set(data) - PATCH_KEYS):
        raise QueueError(f"{path}: unknown key {unknown[0]!r}; a patch has {', '.join(sorted(PATCH_KEYS))}")
    edits = tuple(_load_edit(entry, path) for entry in _require(data, "edit", path))
    return Patch(group, name, _require(data, "purpose", path), _require(data, "drop_when", path), edits)


def _load_edit(data: dict[str, Any], path: Path) -> Edit:
    if unknown := sorted(set(data) - EDIT_KEYS):
        raise QueueError(f"{path}: unknown key {unknown[0]!r} in an edit; it has {', '.join(sorted(EDIT_KEYS))}")
    if ("module" in data) == ("counts" in data):
        raise QueueError(f"{path}: an edit names either 'module' (with 'count') or 'counts'")
    counts = data.get("counts") or {data["module"]: data.get("count", 1)}
    imports = data.get("import", [])
    return Edit(
        find=_require(data, "find", path).strip(),
        replace=_require(data, "replace", path).strip(),
        counts=counts,
        leave=data.get("leave"),
        within=data.get("within"),
        imports=(imports,) if isinstance(imports, str) else tuple(imports),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise QueueError(f"{path}: no such file, but the series names it") from None
    except tomllib.TOMLDecodeError as error:
        raise QueueError(f"{path}: not TOML: {error}") from None


def _require(data: dict[str, Any], key: str, path: Path) -> Any:
    if key not in data:
        raise QueueError(f"{path}: missing key {key!r}")
    return data[key]
