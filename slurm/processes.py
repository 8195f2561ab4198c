"""Starting a run's first process, and ending every process that it led to.

Ray puts its daemons and workers into sessions of their own, and some rename themselves over their environment. So
they are found twice over: as descendants of this process, which orphans are made to fall back to, and by the mark of
the run in their environment.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from slurm import ROOT
from slurm.environment import RUN_MARK

GRACE = 15.0
"""Seconds that a trainer asked to end has to take Ray down with it, before everything is killed."""

AFTERGLOW = 2.0
"""Seconds that Ray's processes may outlive the trainer."""

POLL = 0.05
"""Seconds between two looks at what is left."""

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def _process_control(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _end_with_parent() -> None:
    _process_control(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to end, instead of ending."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, its output appended to `log`. It is told to end if this process dies."""
    _process_control(_SET_CHILD_SUBREAPER, 1)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def processes_of(run: Path, of: int | None = None) -> list[psutil.Process]:
    """Living processes that bear the mark of `run` or descend from process `of`; never this one or its ancestors."""
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {process.pid: process for process in psutil.Process(of).children(recursive=True)} if of else {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in spared and process.environ().get(RUN_MARK) == str(run):
                found[process.pid] = process
    return [process for process in found.values() if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def end_run(run: Path, first: subprocess.Popen[bytes], signals: Sequence[int] = ()) -> list[int]:
    """End every process of the run, `first` gently; what is left after a grace period, or when another of `signals`
    comes in, is killed. Returns the ids of those that even then did not end."""
    if first.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGTERM)
    patience, deadline, outlived = len(signals), time.monotonic() + GRACE, False
    while _remaining(run, first) and time.monotonic() < deadline and len(signals) == patience:
        if first.poll() is not None and not outlived:
            outlived, deadline = True, time.monotonic() + AFTERGLOW
        time.sleep(POLL)
    deadline = time.monotonic() + GRACE
    while (left := _remaining(run, first)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(POLL)
    return [process.pid for process in left]


def _remaining(run: Path, first: subprocess.Popen[bytes]) -> list[psutil.Process]:
    first.poll()  # reaps it, and keeps its exit status for whoever asks
    return processes_of(run, of=os.getpid())
