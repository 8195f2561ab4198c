"""Resolve the requirements in pyproject.toml into containers/locks/*.txt: `make lock`, or `make lock ARGS=--upgrade`.

Needs uv and the package registry's metadata; no package is installed and torch is not downloaded. Versions already
locked are kept where the requirements allow. The CUDA lock is resolved first and constrains the CPU lock, so that both
have every package that they share in one version.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = Path("containers/locks")
PLATFORM = "x86_64-manylinux_2_28"
PYTHON = "3.11"
DIGEST_LINE = "# requirements: sha256:"
UNRESOLVED = (
    "lock: uv could not resolve {lock} (its reason is above); the file is unchanged. "
    "Correct the requirements in pyproject.toml, or check that the package registry answers."
)


def declared() -> dict[str, Any]:
    """The whole of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements_digest(pyproject: dict[str, Any]) -> str:
    """SHA-256 (hex) of all that decides what the locks contain; key order, comments and white space do not count."""
    project, tool = pyproject["project"], pyproject["tool"]
    deciding = {
        "requires-python": project["requires-python"],
        "dependencies": sorted(project["dependencies"]),
        "optional-dependencies": {k: sorted(v) for k, v in project["optional-dependencies"].items()},
        "uv": tool["uv"],
        "locks": tool[project["name"]]["locks"],
        "platform": PLATFORM,
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def recorded_digest(lock: Path) -> str | None:
    """The digest in a lock's header, None when it has none."""
    lines = (line for line in lock.read_text().splitlines() if line.startswith(DIGEST_LINE))
    return next((line.removeprefix(DIGEST_LINE) for line in lines), None)


def resolve(uv: str, flavour: str, settings: dict[str, list[str]], digest: str, extra_arguments: list[str]) -> int:
    """Write the lock of one flavour and return the number of packages in it.

    Raises subprocess.CalledProcessError when uv finds no solution; the lock on disk is then unchanged.
    """
    final = ROOT / LOCKS / f"{flavour}.txt"
    with tempfile.TemporaryDirectory() as scratch:
        output, without = Path(scratch, "lock.txt"), Path(scratch, "without.txt")
        if final.exists():
            shutil.copy(final, output)  # uv prefers the versions in its output file
        without.write_text("\n".join(settings["without"]))
        command = [uv, "pip", "compile", "pyproject.toml", "--output-file", str(output), "--excludes", str(without)]
        command += [part for extra in settings["extras"] for part in ("--extra", extra)]
        command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--no-python-downloads"]
        command += ["--generate-hashes", "--no-header", "--annotation-style", "line", "--quiet"]
        if flavour != "cuda":
            command += ["--constraints", str(LOCKS / "cuda.txt")]
        subprocess.run([*command, *extra_arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        header = f"# Resolved by `make lock` for {PLATFORM}, Python {PYTHON}. Do not edit.\n{DIGEST_LINE}{digest}\n"
        final.write_text(header + output.read_text())
    return sum("==" in line for line in final.read_text().splitlines())


def main() -> int:
    uv = shutil.which(os.environ.get("UV", str(ROOT / ".venv/bin/uv")))
    if uv is None:
        print("lock: no uv found. Run `make setup`, or name one: make lock UV=/path/to/uv", file=sys.stderr)
        return 1
    pyproject = declared()
    digest = requirements_digest(pyproject)
    for flavour, settings in pyproject["tool"][pyproject["project"]["name"]]["locks"].items():
        try:
            count = resolve(uv, flavour, settings, digest, sys.argv[1:])
        except subprocess.CalledProcessError:
            print(UNRESOLVED.format(lock=LOCKS / f"{flavour}.txt"), file=sys.stderr)
            return 1
        print(f"{LOCKS / flavour}.txt: {count} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
