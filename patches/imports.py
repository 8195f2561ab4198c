"""Checks what edits import: the name exists where it is said to be, and nothing in the module takes it away."""

import ast
import symtable
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from patches.errors import QueueError
from patches.queue import PACKAGE, REPO

Scope = (
    ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
)


def check_names(before: str, after: str, sources: dict[str, str], repo: Path = REPO) -> None:
    """Raise QueueError when an import of the package that only ``after`` has names a module or name we do not have."""
    known = {ast.unparse(node) for node in _from_imports(before)}
    for node in _from_imports(after):
        dotted = node.module or ""
        if node.level or not dotted.startswith(f"{PACKAGE}.") or ast.unparse(node) in known:
            continue
        text = _module_text(dotted, sources, repo)
        if text is None:
            raise QueueError(f"`{ast.unparse(node)}`: no module {dotted}, neither ours nor upstream's")
        have = top_level_names(text)
        for alias in node.names:
            submodule = _module_text(f"{dotted}.{alias.name}", sources, repo) is not None
            # A module with this hook (PEP 562) makes its names when they are asked for.
            if not submodule and alias.name not in have and "__getattr__" not in have:
                raise QueueError(f"`{ast.unparse(node)}`: {dotted} has no {alias.name!r}")


def check_free(text: str, statement: str, lines: list[int]) -> None:
    """Raise QueueError when a name that ``statement`` would bind means something else in the module.

    Args:
        text: the module without the import.
        lines: where the imported name will be used (from 1); a function that binds it for itself and holds none of
            these lines does no harm.
    """
    node = ast.parse(statement).body[0]
    assert isinstance(node, ast.Import | ast.ImportFrom)
    tree = ast.parse(text)
    if any(isinstance(other, type(node)) and ast.unparse(other) == statement for other in tree.body):
        return
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        if name in top_level_names(text):
            raise QueueError(f"`{statement}`: the module has another {name!r} at its top level; import it `as` another")
        for table in _function_tables(symtable.symtable(text, "module", "exec")):
            if name not in table.get_identifiers() or not table.lookup(name).is_local():
                continue
            if any(_holds(tree, table.get_lineno(), line) for line in lines):
                raise QueueError(
                    f"`{statement}`: line {table.get_lineno()}: {table.get_name()!r} has its own {name!r}, which would "
                    "hide the imported one; import it `as` another"
                )


def top_level_names(text: str) -> set[str]:
    """Names that a module binds at its top level: definitions, assignments, imports."""
    symbols = symtable.symtable(text, "module", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_namespace()}


# One edit's result is the next one's input, and a build applies the queue more than once.
@lru_cache(maxsize=256)
def _from_imports(text: str) -> tuple[ast.ImportFrom, ...]:
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))


def _module_text(dotted: str, sources: dict[str, str], repo: Path) -> str | None:
    stem = dotted.removeprefix(f"{PACKAGE}.").replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if path in sources:
            return sources[path]
        if (repo / PACKAGE / path).is_file():
            return (repo / PACKAGE / path).read_text(encoding="utf-8")
    return None


def _function_tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        if child.get_type() == "function":
            yield child
        yield from _function_tables(child)


def _holds(tree: ast.Module, start: int, line: int) -> bool:
    """Whether a function, lambda or comprehension that begins on line ``start`` holds ``line``."""
    return any(
        isinstance(node, Scope) and node.lineno == start and start <= line <= (node.end_lineno or start)
        for node in ast.walk(tree)
    )
