"""Applies patches to source text by syntax tree (ast-grep), and says what it looked for when the tree has changed."""

import ast
import contextlib
import difflib
import itertools
import re
from collections.abc import Iterator

from ast_grep_py import SgNode, SgRoot

from patches import imports
from patches.errors import QueueError
from patches.queue import Edit, Patch

Sources = dict[str, str]

METAVARIABLE = re.compile(r"\$\$\$([A-Z_][A-Z0-9_]*)|\$([A-Z_][A-Z0-9_]*)")


def apply_patch(patch: Patch, sources: Sources) -> Sources:
    """Return the sources after one patch; keys are module paths below the package, values the module texts.

    Raises:
        QueueError: a module or definition is gone, a pattern matches another number of times or inside its own match,
            an imported name does not exist or is taken, or the result is not Python any more.
    """
    result = dict(sources)
    for edit in patch.edits:
        if edit.everywhere:
            _check_nothing_else_matches(patch, edit, result)
        for module, count in edit.counts.items():
            if module not in result:
                raise QueueError(f"{patch.title}: {module}: no such module in this release{_nearest(module, result)}")
            result[module] = _apply_edit(patch, edit, module, result[module], count, result)
    return result


def matches(edit: Edit, module: str, text: str, title: str = "") -> list[SgNode]:
    """The nodes of ``text`` that the edit would rewrite, outermost first, in order."""
    return _scope(edit, module, text, title).find_all(pattern=edit.find)


def _apply_edit(patch: Patch, edit: Edit, module: str, text: str, count: int, sources: Sources) -> str:
    found = matches(edit, module, text, patch.title)
    if len(found) != count:
        raise QueueError(_explain_count(patch, edit, module, text, count, found, sources))
    _check_disjoint(patch, edit, module, found)
    if unbound := set(METAVARIABLE.findall(edit.replace)) - set(METAVARIABLE.findall(edit.find)):
        names = ", ".join(sorted(f"$$${many}" if many else f"${one}" for many, one in unbound))
        raise QueueError(
            f"{patch.title}: {module}: the replacement {edit.replace!r} uses {names}, which its pattern does not bind"
        )
    root = SgRoot(text, "python").root()
    after = root.commit_edits([node.replace(_fill(edit.replace, node)) for node in found])
    try:
        ast.parse(after)
    except SyntaxError as error:
        raise QueueError(
            f"{patch.title}: {module}:{error.lineno}: the rewritten module is not Python: {error.msg}"
        ) from None
    try:
        for statement in edit.imports:
            imports.check_free(text, statement, [node.range().start.line + 1 for node in found])
            after = _add_import(after, statement)
        imports.check_names(text, after, sources)
    except QueueError as error:
        raise QueueError(f"{patch.title}: {module}: import {error}") from None
    return after


def _check_disjoint(patch: Patch, edit: Edit, module: str, found: list[SgNode]) -> None:
    """A match inside another would be lost: the outer one's text is taken as it stood before any rewriting."""
    ranges = sorted((node.range() for node in found), key=lambda r: (r.start.index, -r.end.index))
    for outer, inner in itertools.pairwise(ranges):
        if inner.start.index < outer.end.index:
            raise QueueError(
                f"{patch.title}: {module}:{inner.start.line + 1}: a match of {edit.find!r} lies inside the one that "
                f"begins on line {outer.start.line + 1}; make the pattern narrower, or write an edit for each"
            )


def _fill(template: str, node: SgNode) -> str:
    """The template with its metavariables replaced by what they matched; arguments keep their layout and comments."""
    text, start = node.text(), node.range().start.index

    def value(match: re.Match[str]) -> str:
        many, one = match.groups()
        if one:
            return node[one].text()
        nodes = node.get_multiple_matches(many)
        if not nodes:
            return ""
        opens_call = template[match.start() - 1 : match.start()] == "("
        closes_call = template[match.end() : match.end() + 1] == ")"
        last = nodes if closes_call or nodes[-1].text() != "," else nodes[:-1]
        first, end = nodes[0].range().start.index - start, last[-1].range().end.index - start
        before = len(text[:first]) - len(text[:first].rstrip()) if opens_call else 0
        after = len(text[end:]) - len(text[end:].lstrip()) if closes_call else 0
        return text[first - before : end + after]

    return METAVARIABLE.sub(value, template)


def _add_import(text: str, statement: str) -> str:
    """Put an import before the first statement that is neither the docstring nor a ``__future__`` import."""
    body = ast.parse(text).body
    if any(isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) == statement for node in body):
        return text
    lines = text.splitlines(keepends=True)
    for node in body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not docstring and not future:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            return "".join([*lines[: first - 1], statement + "\n", *lines[first - 1 :]])
    return text + statement + "\n"


def _scope(edit: Edit, module: str, text: str, title: str) -> SgNode:
    node = SgRoot(text, "python").root()
    if edit.within is None:
        return node
    path: list[str] = []
    for name in edit.within.split("."):
        path.append(name)
        found = _definition(node, name)
        if found is None:
            have = [qualified for qualified, _ in definitions(text)]
            close = difflib.get_close_matches(".".join(path), have, n=3, cutoff=0.4)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise QueueError(f"{title}: {module}: no definition {'.'.join(path)!r} in this release{hint}")
        node = found
    return node


def _definition(node: SgNode, name: str) -> SgNode | None:
    for kind in ("class_definition", "function_definition"):
        rule = {"rule": {"kind": kind, "has": {"field": "name", "regex": f"^{re.escape(name)}$"}}}
        found = node.find(rule)
        if found is not None:
            return found
    return None


def definitions(text: str) -> Iterator[tuple[str, ast.AST]]:
    """Qualified names and nodes of all classes and functions of a module, nested ones included.

    A module that this Python cannot parse (a template, say) has none.
    """

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                yield name, child
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    with contextlib.suppress(SyntaxError):
        yield from walk(ast.parse(text), "")


def enclosing(text: str, line: int) -> str:
    """Qualified name of the innermost class or function that holds a line (from 1), or ``<module>``."""
    best = "<module>"
    for name, node in definitions(text):
        assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            best = name
    return best


def _check_nothing_else_matches(patch: Patch, edit: Edit, sources: Sources) -> None:
    assert edit.leave is not None
    for module, text in sources.items():
        if module in edit.counts or module in edit.leave:
            continue
        for node in SgRoot(text, "python").root().find_all(pattern=edit.find):
            line = node.range().start.line + 1
            raise QueueError(
                f"{patch.title}: {module}:{line}: {edit.find!r} also matches here (in {enclosing(text, line)}), "
                "in a module that the patch names neither under 'counts' nor under 'leave'; decide which and add it"
            )
    for module in edit.leave:
        if module not in sources:
            raise QueueError(
                f"{patch.title}: leave: {module}: no such module in this release{_nearest(module, sources)}"
            )


def _explain_count(
    patch: Patch, edit: Edit, module: str, text: str, count: int, found: list[SgNode], sources: Sources
) -> str:
    where = f"{module}, {edit.within}" if edit.within else module
    lines = [f"{patch.title}: {where}: looked for {edit.find!r} {count} time(s), found {len(found)}"]
    for node in found:
        line = node.range().start.line + 1
        lines.append(f"  match at {module}:{line} in {enclosing(text, line)}: {_short(node.text())}")
    if len(found) < count:
        candidates = _candidates(edit, sources)
        lines += [f"  candidate {candidate}" for candidate in candidates] or ["  no other place uses these names"]
    return "\n".join(lines)


def _candidates(edit: Edit, sources: Sources, most: int = 5) -> list[str]:
    """Places whose text is nearest to the pattern: lines that share its rarest names."""
    names = set(re.findall(r"[A-Za-z_]{3,}", METAVARIABLE.sub("", edit.find)))
    wanted = METAVARIABLE.sub("", edit.find)
    scored = []
    for module, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            shared = names & set(re.findall(r"[A-Za-z_]{3,}", line))
            if shared:
                likeness = difflib.SequenceMatcher(None, wanted, line.strip()).ratio() + len(shared) / len(names)
                scored.append((likeness + (module in edit.counts), module, number))
    scored.sort(key=lambda row: (-row[0], row[1], row[2]))
    return [
        f"{module}:{number} in {enclosing(sources[module], number)}: {_short(sources[module].splitlines()[number - 1])}"
        for _, module, number in scored[:most]
    ]


def _short(text: str, width: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def _nearest(module: str, sources: Sources) -> str:
    same_name = [path for path in sources if path.split("/")[-1] == module.split("/")[-1]]
    close = same_name or difflib.get_close_matches(module, list(sources), n=3)
    return f"; nearest: {', '.join(close)}" if close else ""
