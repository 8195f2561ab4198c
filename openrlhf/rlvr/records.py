"""Who got how many samples and what came of them, as JSON lines from which every count and advantage follows.

In the folder ``--logger.groups_path``:

``draws.jsonl``, by the sample generator: for each attempt a line of settings, then a line for each draw, accepted into
a training batch or filtered out, with what was known of the prompt before it and the scores of its samples.

``updates.jsonl``, by the trainer: for each step the groups of its batch, with rewards and advantages of each sample.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.metrics import append_lines


@settings("logger")
class Groups:
    """Where the records of groups go."""

    groups_path: str | None = flag(
        None, "folder for draws.jsonl and updates.jsonl: samples, verdicts and advantages of each draw of a prompt"
    )


class JsonLines:
    """A file to which rows are appended; without a folder, nothing is written."""

    def __init__(self, args: Any, name: str) -> None:
        folder = Groups.of(args).groups_path  # type: ignore[attr-defined]
        self._path = os.path.join(folder, name) if folder else None
        if folder:
            os.makedirs(folder, exist_ok=True)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        if self._path:
            now = time.time()
            append_lines(self._path, [json.dumps({**row, "time": now}, allow_nan=False) for row in rows])


BINS = 8


def histogram(counts: Sequence[float], low: int, high: int) -> dict[str, float]:
    """Shares of groups by number of samples, in at most eight bins of equal width over the bounds, both included.

    Without an allocation all groups have the average, which lies within the default bounds.
    """
    width = -(-(high - low + 1) // BINS)
    shares: dict[str, float] = {}
    for start in range(low, high + 1, width):
        end = min(start + width - 1, high)
        name = f"{start}" if start == end else f"{start}_{end}"
        inside = sum(start <= count <= end for count in counts)
        shares[f"groups/share_with_{name}"] = inside / len(counts)
    return shares
