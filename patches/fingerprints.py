"""Fingerprints of the upstream definitions that the fork leans on, so that a silent change of one is reported.

A patch that still matches proves little: the function around the matched call, or the class that one of our modules
subclasses, may have changed its meaning. The lock holds a hash of each such definition's syntax tree without
docstrings, comments and layout.
"""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from patches.errors import QueueError
from patches.queue import PACKAGE, Series
from patches.rewrite import Sources, apply_patch, definitions, enclosing, matches

Fingerprints = dict[str, str]


def of_series(series: Series, sources: Sources, repo: Path) -> Fingerprints:
    """Fingerprint every definition that a patch edits, that our modules import, or that the series names.

    Keys are ``module:qualified.name``; a class has one entry for its head and class-level statements and one for each
    method. Edits that speak for the whole package (the device rule) are left out: they do not depend on what the
    functions around their matches do.
    """
    wanted = set(_edited(series, sources)) | set(_imported(series, sources, repo)) | set(_named(series, sources))
    result: Fingerprints = {}
    for module, name in sorted(wanted):
        result |= _fingerprint(sources, module, name)
    return result


def compare(locked: Fingerprints, found: Fingerprints) -> list[str]:
    """One line for each difference between the lock and a release."""
    changed = [f"changed: {key}" for key in sorted(locked.keys() & found.keys()) if locked[key] != found[key]]
    gone = [f"gone:    {key}" for key in sorted(locked.keys() - found.keys())]
    new = [f"new:     {key} (not in the lock)" for key in sorted(found.keys() - locked.keys())]
    return changed + gone + new


def check(locked: Fingerprints, found: Fingerprints, version: str) -> None:
    """Raise QueueError when a definition that we lean on differs from the lock."""
    if differences := compare(locked, found):
        raise QueueError(
            f"upstream definitions that the fork edits, subclasses or calls differ from the lock of {version}:\n  "
            + "\n  ".join(differences)
            + "\n  Read each in the release, adapt the patch or module, then accept with: python -m patches lock"
        )


def _named(series: Series, sources: Sources) -> Iterator[tuple[str, str]]:
    """Definitions that ``series.toml`` names because our modules reach them through an object, not by an import."""
    for group in series.groups:
        for entry in group.leans_on:
            module, _, name = entry.partition(":")
            if module not in sources or name not in dict(definitions(sources[module])):
                raise QueueError(f"series.toml: {group.name}: leans_on: {entry}: no such definition in this release")
            yield module, name


def _edited(series: Series, sources: Sources) -> Iterator[tuple[str, str]]:
    """Innermost upstream definitions around each match, found in the pristine text where the match stands there."""
    texts = sources
    for patch in series.patches:
        for edit in patch.edits:
            if edit.everywhere:
                continue
            for module in edit.counts:
                if module not in texts:
                    continue  # applying the patch reports it
                for node in matches(edit, module, texts[module], patch.title):
                    name = enclosing(texts[module], node.range().start.line + 1)
                    # Module level holds the flag parser, which changes in every release: the match count is its anchor.
                    if name != "<module>":
                        yield module, name
        texts = apply_patch(patch, texts)


def _imported(series: Series, sources: Sources, repo: Path) -> Iterator[tuple[str, str]]:
    """Upstream names imported by the modules of the series' groups."""
    for group in series.groups:
        for path in sorted((repo / group.package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
                if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(f"{PACKAGE}."):
                    continue
                for alias in node.names:
                    found = _locate(sources, str(node.module), alias.name)
                    if found is not None:
                        yield found
                    elif not _is_ours(repo, str(node.module)):
                        raise QueueError(f"{path}:{node.lineno}: {node.module} has no {alias.name!r} in this release")


def _is_ours(repo: Path, dotted: str) -> bool:
    path = repo / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def _locate(sources: Sources, dotted: str, name: str) -> tuple[str, str] | None:
    """Module path and name where an importable name is defined, through re-exports."""
    stem = dotted.removeprefix(f"{PACKAGE}.").replace(".", "/")
    module = next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in sources), None)
    if module is None:
        return None
    for node in ast.parse(sources[module]).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, name
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, name
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            base = (
                dotted.rsplit(".", node.level - (1 if module.endswith("__init__.py") else 0))[0] if node.level else ""
            )
            target = ".".join(part for part in (base, node.module) if part)
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            if target.startswith(f"{PACKAGE}."):
                return _locate(sources, target, original)
    return None


def _fingerprint(sources: Sources, module: str, name: str) -> Fingerprints:
    tree = ast.parse(sources[module])
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return {f"{module}:{name}": _digest(node)}
    definition = dict(definitions(sources[module]))[name]
    if not isinstance(definition, ast.ClassDef):
        return {f"{module}:{name}": _digest(definition)}
    methods = [child for child in definition.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
    result = {f"{module}:{name}.{method.name}": _digest(method) for method in methods}
    definition.body = [child for child in definition.body if child not in methods] or [ast.Pass()]
    result[f"{module}:{name}"] = _digest(definition)
    return result


def _digest(node: ast.AST) -> str:
    for child in ast.walk(node):
        body = getattr(child, "body", None)
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) or not body:
            continue
        if (
            isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            child.body = body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16]
