"""What holds for every test: the environment of a run on CPU, and that a session which tests nothing does not pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

REPO = Path(__file__).resolve().parents[1]

# Set before anything imports torch, DeepSpeed or transformers; child processes inherit it.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


# Examples are timed by nobody: a busy machine is no failure of a property.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session whose tests were all skipped ends as one that found none: with exit code 5."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:
        return
    if exitstatus == pytest.ExitCode.OK and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session")
def task() -> Path:
    """Folder of the tiny task, made once for all tests and for `make train`."""
    folder = REPO / "build" / "tiny"
    subprocess.run([sys.executable, "-m", "openrlhf.rlvr.tiny_task", "--output", str(folder)], cwd=REPO, check=True)
    return folder
