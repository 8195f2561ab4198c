"""Upstream's own tests, from its wheel, on the fork."""

import os
import re
import subprocess
import sys

import pytest

from patches.queue import REPO

pytestmark = pytest.mark.slow


def test_upstreams_tests_pass_on_the_fork():
    """In a process and a folder of their own: they bring a top-level package ``tests``.

    Without the switch to the CPU: they replace modules and arguments by mocks, on which nothing can be decided.
    """
    folder = REPO / "build" / "upstream"
    assert (folder / "tests").is_dir(), "python -m patches build unpacks them"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(folder),
            "tests",
        ],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    summary = done.stdout.strip().splitlines()[-1]
    passed = int(re.search(r"(\d+) passed", summary).group(1))
    assert done.returncode == 0, done.stdout[-4000:]
    assert passed > 200, summary
