"""Whether two mathematical expressions are equivalent, decided by math-verify within a limit of time.

math-verify limits itself by signals, which only work in a main thread, and rewards are computed in threads. Here it
runs in another process, without its own limits; a comparison that takes too long ends that process, and the next one
starts a new process. Run as a program, this file is that process.
"""

import atexit
import logging
import math
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Literal

Outcome = Literal["equivalent", "not equivalent", "timed out", "comparison failed"]

SECONDS_TO_START = 120.0
MEMORY = 1 << 30
"""Bytes of address space: a tower of powers would otherwise fill the machine before its time is up."""


class Comparer:
    """Compares one pair at a time, from any thread.

    Args:
        seconds: wall-clock limit of one comparison.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        atexit.register(self.close)

    def compare(self, gold: str, answer: str) -> Outcome:
        """Compare two LaTeX expressions of bounded length.

        Raises:
            RuntimeError: math-verify cannot be started at all.
        """
        with self._lock:
            connection = self._connection or self._start()
            outcome: Outcome = "timed out"
            try:
                connection.send((gold, answer))
                if connection.poll(self.seconds):
                    return "equivalent" if connection.recv() else "not equivalent"
            except (EOFError, OSError):
                outcome = "comparison failed"
            self.close()
            return outcome

    def close(self) -> None:
        """End the process; the next comparison starts another."""
        if self._process and self._connection:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        # -P: the folder of this file holds a math.py, which must not stand in for the standard library's.
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), str(math.ceil(self.seconds) + 1)]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            if self._connection.poll(SECONDS_TO_START) and self._connection.recv() == "ready":
                return self._connection
        except EOFError:
            pass
        self.close()
        raise RuntimeError(f"math-verify did not start; see why with: {' '.join(command[:3])}")


def _serve(connection: Connection, seconds: int) -> None:
    """Answer pairs until the other side is gone; `seconds` ends a comparison whose asker died."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; our end is the pipe's
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    connection.send("ready")
    while True:
        try:
            pair = connection.recv()
        except EOFError:
            return
        signal.alarm(seconds)
        gold, answer = (parse(f"\\boxed{{{text}}}", extraction_config=boxed, parsing_timeout=None) for text in pair)
        equivalent = bool(gold and answer) and verify(gold, answer, timeout_seconds=None)
        signal.alarm(0)
        connection.send(equivalent)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
    else:
        import math_verify  # noqa: F401  # fails with the reason
