"""The pinned upstream release: found or downloaded, verified by hash, read without being installed."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from email.parser import HeaderParser
from pathlib import Path

from patches.errors import QueueError
from patches.queue import PACKAGE, REPO, ROOT

LOCK_TYPES = {"version": str, "wheel": str, "sha256": str, "requires_dist": list, "fingerprints": dict}
CACHE = REPO / "build" / "cache"


def lock_path(version: str, root: Path = ROOT) -> Path:
    return root / "locks" / f"{PACKAGE}-{version}.json"


def load_lock(version: str, root: Path = ROOT) -> dict:
    """The lock of a release; QueueError when it is missing, cannot be read or lacks a key."""
    path = lock_path(version, root)
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QueueError(f"{path}: no lock for release {version}; `python -m patches lock` writes it") from None
    except json.JSONDecodeError as error:
        raise QueueError(f"{path}:{error.lineno}: not JSON: {error.msg}; restore it from git") from None
    except UnicodeDecodeError as error:
        raise QueueError(f"{path}: not UTF-8 at byte {error.start}; restore it from git") from None
    for key, kind in LOCK_TYPES.items():
        if not isinstance(lock, dict) or not isinstance(lock.get(key), kind):
            raise QueueError(f"{path}: {key!r} is missing or no {kind.__name__}; restore it from git")
    return lock


def find_wheel(version: str, given: Path | None, cache: Path = CACHE) -> Path:
    """Path of the release's wheel: the given file, else the cached one, else downloaded by pip.

    Raises:
        QueueError: the given file does not exist, or the registry cannot be reached.
    """
    if given is not None:
        if not given.is_file():
            raise QueueError(f"--wheel {given}: no such file")
        return given
    cached = sorted(cache.glob(f"{PACKAGE}-{version}-*.whl"))
    return cached[0] if cached else _download(version, cache)


def _download(version: str, cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    # Into a folder of its own first: an interrupted download must not look like a cached wheel.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        # The upstream wheel is tagged for one Python although it is pure; any interpreter may read it.
        command += ["--python-version", "3.11", "--platform", "manylinux1_x86_64", "--dest", folder]
        done = subprocess.run([*command, f"{PACKAGE}=={version}"], capture_output=True, text=True)
        found = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not found:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise QueueError(
                f"could not download {PACKAGE}=={version}: {reason}\n"
                "  Without a package registry, pass the release's wheel: python -m patches build --wheel FILE"
            )
        target = cache / found[0].name
        os.replace(found[0], target)
        return target


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verify(wheel: Path, lock: dict) -> None:
    """Raise QueueError unless the wheel is the file that the lock was made from."""
    found = sha256(wheel)
    if found != lock["sha256"]:
        raise QueueError(
            f"{wheel}: sha256 is {found},\n  the lock of release {lock['version']} says {lock['sha256']}.\n"
            "  Not built: this is another file. Delete it to download again, or give the right one with --wheel."
        )


class Release:
    """Texts of a release's wheel, by what they are."""

    def __init__(self, wheel: Path) -> None:
        self.package: dict[str, bytes] = {}
        self.tests: dict[str, bytes] = {}
        self.licence = b""
        self.metadata = ""
        for name, data in _members(wheel).items():
            # Files stand at the top of a plain wheel, or below NAME.data/purelib/ in one tagged for a platform.
            path = name.split(".data/purelib/", 1)[-1]
            if path.startswith(f"{PACKAGE}/"):
                self.package[path.removeprefix(f"{PACKAGE}/")] = data
            elif path.startswith("tests/"):
                self.tests[path.removeprefix("tests/")] = data
            elif path.endswith(".dist-info/METADATA"):
                self.metadata = data.decode(errors="replace")
            elif path.endswith((".dist-info/LICENSE", ".dist-info/licenses/LICENSE")):
                self.licence = data
        for part, what in (
            (self.package, f"package {PACKAGE!r}"),
            (self.metadata, "METADATA"),
            (self.licence, "LICENSE, which the fork must carry on"),
        ):
            if not part:
                raise QueueError(f"{wheel}: holds no {what}; give a complete wheel with --wheel")

    @property
    def sources(self) -> dict[str, str]:
        """Python modules below the package, path to text."""
        result = {}
        for path, data in self.package.items():
            if path.endswith(".py"):
                try:
                    result[path] = data.decode()
                except UnicodeDecodeError as error:
                    raise QueueError(
                        f"{path}: the release's module is not UTF-8 at byte {error.start}, which the queue cannot edit"
                    ) from None
        return result

    @property
    def version(self) -> str:
        return str(HeaderParser().parsestr(self.metadata)["Version"])

    @property
    def requires_dist(self) -> list[str]:
        return [str(value) for value in HeaderParser().parsestr(self.metadata).get_all("Requires-Dist") or []]


def _members(wheel: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    # What zipfile raises for damage in the directory, in a member's data, and in a member's header.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise QueueError(f"{wheel}: not a wheel, or damaged ({error}); delete it to download it again") from None
