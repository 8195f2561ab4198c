"""Builds the fork: a development tree whose own modules are links into this repository, and wheels.

Everything lands under one output folder::

    trees/KEY/openrlhf/…      the patched package; trees/KEY/MANIFEST.json says what it is
    tree -> trees/KEY         switched by one rename when a build is complete
    dist/openrlhf-V-py3-none-any.whl           the fork, self-contained
    dist/editable/openrlhf-V-py3-none-any.whl  points an environment at ``tree``
    upstream/tests/…          upstream's own tests, from its wheel, beside a link to the package of ``tree``
    stamp.json                KEY of the last complete build, and the size of each file above

KEY is a hash of the release, the queue and our modules, so that a build with nothing changed only compares it, and the
sizes, so that a damaged one is built again.
"""

import base64
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from patches import fingerprints
from patches.errors import QueueError
from patches.queue import PACKAGE, REPO, ROOT, Series
from patches.release import Release, load_lock, sha256, verify
from patches.rewrite import Sources, apply_patch

KEPT_TREES = 2
STAMP = "stamp.json"


@dataclass(frozen=True)
class Build:
    """What one build left behind."""

    version: str
    tree: Path
    wheel: Path
    editable: Path
    fresh: bool


def build(series: Series, wheel: Path, output: Path, label: str = "rlvr") -> Build:
    """Build the fork from the release's wheel into ``output`` unless it is there already.

    Raises:
        QueueError: the wheel is not the locked one, a patch does not fit, a fingerprint differs, or one of our
            modules takes a path that upstream uses.
    """
    lock = load_lock(series.upstream)
    verify(wheel, lock)
    own = own_modules(series)
    key = _key(series, lock, own, label)
    version = f"{series.upstream}+{label}.{key[:8]}"
    name = f"{PACKAGE}-{version}-py3-none-any.whl"
    result = Build(version, output / "tree", output / "dist" / name, output / "dist" / "editable" / name, fresh=True)
    with _locked(output):
        if _is_current(output, key):
            return Build(version, result.tree, result.wheel, result.editable, fresh=False)
        release = Release(wheel)
        sources = patched_sources(series, release, lock)
        manifest = {
            "version": version,
            "upstream": series.upstream,
            "upstream_sha256": lock["sha256"],
            "queue_hash": _hash_files(_queue_files()),
            "groups": [group.name for group in series.groups],
            "patches": [patch.title for patch in series.patches],
            "key": key,
        }
        _write_tree(output, key, release, sources, own, manifest)
        _write_tests(output, release)
        _write_wheels(result, release, sources, own, manifest)
        _switch(output, key)
        stamp = {"key": key, "files": _sizes(output, key)}
        (output / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
    return result


def patched_sources(series: Series, release: Release, lock: dict) -> Sources:
    """The release's modules after the whole queue, checked against the fingerprints of the lock."""
    pristine = release.sources
    found = fingerprints.of_series(series, pristine, REPO)
    # A part of the series leans on a part of the locked definitions.
    locked = lock["fingerprints"]
    fingerprints.check({key: locked[key] for key in locked if key in found}, found, lock["version"])
    sources = pristine
    for patch in series.patches:
        sources = apply_patch(patch, sources)
    return sources


def own_modules(series: Series) -> dict[str, Path]:
    """Our modules of the series' groups: path below the package, to file."""
    files = {}
    for group in series.groups:
        folder = REPO / group.package
        if not folder.is_dir():
            raise QueueError(f"{folder}: no such folder, but group {group.name!r} of series.toml names it")
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[path.relative_to(REPO / PACKAGE).as_posix()] = path
    return files


def _queue_files() -> list[Path]:
    return sorted(path for pattern in ("*.py", "*.toml", "*/*.toml", "locks/*.json") for path in ROOT.glob(pattern))


def _hash_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(REPO)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _key(series: Series, lock: dict, own: dict[str, Path], label: str) -> str:
    parts = [label, lock["sha256"], ",".join(group.name for group in series.groups)]
    parts += [_hash_files(_queue_files()), _hash_files(list(own.values()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_current(output: Path, key: str) -> bool:
    try:
        stamp = json.loads((output / STAMP).read_text())
        return bool(stamp["key"] == key and all(_size(output / path) == size for path, size in stamp["files"].items()))
    # No stamp, or none that can be read, or a file of the build is gone: all are mended by building.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sizes(output: Path, key: str) -> dict[str, int | str]:
    paths = [output / "tree"]
    for part in (f"trees/{key}", "dist", "upstream"):
        for folder, folders, files in os.walk(output / part):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            paths += [Path(folder, name) for name in (*files, *links)]
    return {path.relative_to(output).as_posix(): _size(path) for path in sorted(paths)}


def _size(path: Path) -> int | str:
    """Bytes of a file; of a link, where it points."""
    status = path.lstat()
    return os.readlink(path) if stat.S_ISLNK(status.st_mode) else status.st_size


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / ".lock").touch()
    except OSError as error:
        raise QueueError(f"--output {output}: cannot be a folder to write to: {error.strerror}") from None
    with open(output / ".lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write_tree(
    output: Path, key: str, release: Release, sources: Sources, own: dict[str, Path], manifest: dict
) -> None:
    trees = output / "trees"
    trees.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=trees, prefix=".unfinished-") as folder:
        package = Path(folder, PACKAGE)
        for path, data in release.package.items():
            target = package / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(sources[path].encode() if path in sources else data)
        for path, source in own.items():
            _link(package, path, source)
        Path(folder, "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n")
        target = trees / key
        _remove(target)
        os.chmod(folder, 0o755)
        os.rename(folder, target)
        os.mkdir(folder)  # for the context manager to remove


def _link(package: Path, path: str, source: Path) -> None:
    """Link the topmost folder that upstream does not have, so that new files of ours need no build to be seen."""
    parts = Path(path).parts
    for depth in range(1, len(parts) + 1):
        target = package.joinpath(*parts[:depth])
        if target.is_symlink():
            return
        if not target.exists():
            up = len(parts) - depth
            target.symlink_to(source.parents[up - 1] if up else source)
            return
    raise QueueError(
        f"{source}: upstream has {PACKAGE}/{path} too; a patch may edit it, a file of ours may not replace it"
    )


def _remove(path: Path) -> None:
    """Delete a result of an earlier build, whatever has become of it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_tests(output: Path, release: Release) -> None:
    folder = output / "upstream"
    _remove(folder)
    (folder / "tests").mkdir(parents=True)
    for path, data in release.tests.items():
        target = folder / "tests" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    # They load some modules by file, from a package that stands beside them.
    (folder / PACKAGE).symlink_to(Path("..") / "tree" / PACKAGE)


def _write_wheels(result: Build, release: Release, sources: Sources, own: dict[str, Path], manifest: dict) -> None:
    _remove(result.wheel.parent)
    result.editable.parent.mkdir(parents=True)
    files = {f"{PACKAGE}/{path}": data for path, data in release.package.items()}
    files |= {f"{PACKAGE}/{path}": text.encode() for path, text in sources.items()}
    files |= {f"{PACKAGE}/{path}": source.read_bytes() for path, source in own.items()}
    _write_wheel(result.wheel, result.version, release, files, manifest)
    _write_wheel(result.editable, result.version, release, {f"_{PACKAGE}.pth": f"{result.tree}\n".encode()}, manifest)


def _write_wheel(path: Path, version: str, release: Release, files: dict[str, bytes], manifest: dict) -> None:
    info = f"{PACKAGE}-{version}.dist-info"
    metadata = release.metadata.replace(f"\nVersion: {release.version}\n", f"\nVersion: {version}\n", 1)
    files = dict(sorted(files.items()))
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/LICENSE"] = release.licence
    files[f"{info}/NOTICE"] = (REPO / "NOTICE").read_bytes()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: patches\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/fork.json"] = (json.dumps(manifest, indent=2) + "\n").encode()
    record = f"{info}/RECORD"
    rows = [f"{name},{_record_hash(data)},{len(data)}" for name, data in files.items()] + [f"{record},,"]
    files[record] = ("\n".join(rows) + "\n").encode()
    unfinished = path.with_suffix(".unfinished")
    with zipfile.ZipFile(unfinished, "w") as archive:
        for name, data in files.items():
            # A fixed time, so that equal content gives an equal file.
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    os.rename(unfinished, path)


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


def _switch(output: Path, key: str) -> None:
    tree, link = output / "tree", output / ".tree-next"
    if tree.is_dir() and not tree.is_symlink():
        raise QueueError(f"{tree}: is a folder, not the link that a build makes; move it away")
    link.unlink(missing_ok=True)
    link.symlink_to(Path("trees") / key)
    os.replace(link, tree)
    folders = [path for path in (output / "trees").iterdir() if path.is_dir() and path.name != key]
    # The tree before this one may still be imported by a running job.
    for old in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT_TREES - 1 :]:
        shutil.rmtree(old)


def make_lock(series: Series, wheel: Path) -> dict:
    """The lock of a release: its hash, what it requires, and fingerprints of what the queue and our modules use."""
    release = Release(wheel)
    if release.version != series.upstream:
        raise QueueError(f"{wheel}: is release {release.version}; series.toml pins {series.upstream}")
    return {
        "version": release.version,
        "wheel": wheel.name,
        "sha256": sha256(wheel),
        "requires_dist": release.requires_dist,
        "fingerprints": fingerprints.of_series(series, release.sources, REPO),
    }
