"""Command line of the queue: ``python -m patches build | status | diff | lock``."""

import argparse
import contextlib
import difflib
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from patches import build as builder
from patches import fingerprints
from patches.errors import QueueError
from patches.queue import PACKAGE, REPO, Edit, Series, load_series
from patches.release import Release, find_wheel, load_lock, lock_path, verify
from patches.rewrite import Sources, apply_patch, matches


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m patches", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--wheel", type=Path, help="the release's wheel, instead of the cache or the registry")
    part = argparse.ArgumentParser(add_help=False, parents=[shared])
    part.add_argument("--without", action="append", default=[], metavar="GROUP", help="leave out a trailing group")
    build = commands.add_parser("build", parents=[part], help="build the development tree and the wheels")
    build.add_argument("--output", type=Path, default=REPO / "build", help="folder of the result (build/)")
    commands.add_parser("status", parents=[part], help="the queue as a table, matched against the release")
    commands.add_parser("diff", parents=[part], help="what the queue changes in upstream, as a unified diff")
    commands.add_parser("lock", parents=[shared], help="accept the release as it is now: hash, pins, fingerprints")
    args = parser.parse_args()
    try:
        # The lock is of the whole series.
        series = load_series().without([] if args.command == "lock" else args.without)
        wheel = find_wheel(series.upstream, args.wheel)
        if args.command == "build":
            return _build(series, wheel, args.output.resolve())
        if args.command == "lock":
            return _lock(series, wheel)
        lock = load_lock(series.upstream)
        verify(wheel, lock)
        return (_status if args.command == "status" else _diff)(series, Release(wheel), lock)
    except QueueError as error:
        print(f"patches: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(f"patches: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return 1


def _build(series: Series, wheel: Path, output: Path) -> int:
    left_out = [group.name for group in load_series().groups if group not in series.groups]
    result = builder.build(series, wheel, output, label="rlvr" if not left_out else "reference")
    print(f"{PACKAGE} {result.version}: {'built' if result.fresh else 'nothing changed'}")
    print(f"  tree      {result.tree}\n  wheel     {result.wheel}\n  editable  {result.editable}")
    return 0


def _status(series: Series, release: Release, lock: dict) -> int:
    table = Table(title=f"{len(series.patches)} patches on {PACKAGE} {series.upstream}", show_lines=True)
    for column in ("patch", "purpose", "anchors", "matches", "lines", "can be dropped when"):
        table.add_column(column, overflow="fold", justify="right" if column == "matches" else "left")
    sources, failed = release.sources, 0
    for patch in series.patches:
        anchors = [_anchor(edit) for edit in patch.edits]
        counts = [f"{_found(edit, sources)}/{sum(edit.counts.values())}" for edit in patch.edits]
        try:
            after = apply_patch(patch, sources)
            touched = "−{} +{}".format(*_lines(sources, after))
        except QueueError as error:
            after, touched, failed = sources, "does not apply", failed + 1
            print(f"patches: {error}", file=sys.stderr)
        table.add_row(patch.title, patch.purpose, "\n".join(anchors), "\n".join(counts), touched, patch.drop_when)
        sources = after
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if failed:
        return 1
    removed, added = _lines(release.sources, sources)
    print(f"upstream lines touched: −{removed} +{added} in {_files(release.sources, sources)} files")
    fingerprints.check(
        lock["fingerprints"], fingerprints.of_series(load_series(), release.sources, REPO), lock["version"]
    )
    print(f"fingerprints of {len(lock['fingerprints'])} upstream definitions agree with the lock")
    return 0


def _anchor(edit: Edit) -> str:
    if edit.everywhere:
        return f"{edit.find} in {len(edit.counts)} modules"
    places = ", ".join(edit.counts)
    return f"{edit.find} in {places}" + (f", {edit.within}" if edit.within else "")


def _found(edit: Edit, sources: Sources) -> int:
    total = 0
    for module in edit.counts:
        # A vanished definition counts as no match here; applying the patch says it in full.
        with contextlib.suppress(QueueError):
            total += len(matches(edit, module, sources[module])) if module in sources else 0
    return total


def _lines(before: Sources, after: Sources) -> tuple[int, int]:
    removed = added = 0
    for line in _diff_lines(before, after):
        removed += line.startswith("-") and not line.startswith("---")
        added += line.startswith("+") and not line.startswith("+++")
    return removed, added


def _files(before: Sources, after: Sources) -> int:
    return sum(before[path] != after[path] for path in before)


def _diff_lines(before: Sources, after: Sources) -> list[str]:
    lines: list[str] = []
    for path in sorted(before):
        name = f"{PACKAGE}/{path}"
        rows = (before[path].splitlines(keepends=True), after[path].splitlines(keepends=True))
        lines += difflib.unified_diff(*rows, f"a/{name}", f"b/{name}")
    return lines


def _diff(series: Series, release: Release, lock: dict) -> int:
    sys.stdout.writelines(_diff_lines(release.sources, builder.patched_sources(series, release, lock)))
    sys.stdout.flush()
    return 0


def _lock(series: Series, wheel: Path) -> int:
    path, old = lock_path(series.upstream), {}
    # A lock that is missing or damaged is written anew, and all of it is listed as new.
    with contextlib.suppress(QueueError):
        old = load_lock(series.upstream)["fingerprints"]
    lock = builder.make_lock(series, wheel)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(lock, indent=2) + "\n")
    for line in fingerprints.compare(old, lock["fingerprints"]):
        print(line)
    print(f"{path}: {len(lock['fingerprints'])} fingerprints")
    return 0


sys.exit(main())
