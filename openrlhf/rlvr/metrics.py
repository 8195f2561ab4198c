"""Metrics as JSON lines: one line for each step and each evaluation, readable while the run goes on."""

import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from openrlhf.rlvr.flags import flag, settings


@settings("logger")
class Metrics:
    """Where the metrics go, beside upstream's TensorBoard and Weights & Biases."""

    metrics_path: str | None = flag(None, "append the metrics of each step and evaluation to this file, as JSON lines")


class Tracker(Protocol):
    """Upstream's interface of a metrics backend."""

    def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None: ...
    def log_eval(self, global_step: int, logs_dict: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class MetricsLogger:
    """Appends metrics to a file, and hands them on to another backend where there is one.

    A line is ``{"kind": "train" | "eval", "step": int, "time": seconds, "metrics": {name: number}}``; a value that is
    not finite is null. Lines are written whole and flushed, so that a reader never waits for a step that has ended.
    """

    def __init__(self, path: str | None, inner: Tracker | None) -> None:
        self._path = path
        self._inner = inner
        self.last_step: dict[str, int] = {}

    def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        self._append("train", global_step, logs_dict)
        if self._inner:
            self._inner.log_train(global_step, logs_dict)

    def log_eval(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        self._append("eval", global_step, logs_dict)
        if self._inner:
            self._inner.log_eval(global_step, logs_dict)

    def close(self) -> None:
        if self._inner:
            self._inner.close()

    def _append(self, kind: str, step: int, logs: dict[str, Any]) -> None:
        self.last_step[kind] = step
        if self._path is None:
            return
        metrics = {name: _number(value) for name, value in logs.items() if name != "generated_samples"}
        line = json.dumps({"kind": kind, "step": step, "time": time.time(), "metrics": metrics}, allow_nan=False)
        append_lines(self._path, [line])


def append_lines(path: str, lines: Sequence[str]) -> None:
    """Append whole lines to a file; what a killed process left of its last line ends there."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else ["", *lines]
        file.write("".join(f"{line}\n" for line in lines).encode())


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def metrics_logger(args: Any, inner: Tracker | None) -> Tracker | None:
    """The backend that upstream's trainer logs to: its own, with the metrics file in front of it where one is set."""
    path = Metrics.of(args).metrics_path  # type: ignore[attr-defined]
    return MetricsLogger(path, inner) if path or inner else None
