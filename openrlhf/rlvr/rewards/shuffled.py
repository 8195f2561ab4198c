"""Control experiment: every response is paid another response's verdict.

The rewards have the distribution of `math.py`'s but tell nothing about the response, so whatever a run gains with them
is not learnt from rewards. `extra_logs` tells the true accuracy.
"""

import random
import threading
from collections.abc import Sequence
from typing import Any

import torch

from openrlhf.rlvr.rewards import math

WAITING = 32
"""Verdicts that wait to be paid, to any later response. Each is paid once, so that the mean of many rewards is true."""

_lock = threading.Lock()
_waiting: list[float] = []
_random = random.Random(0)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any) -> dict[str, Any]:
    """As `math.reward_func`, with the rewards of other responses in `rewards` and `scores`."""
    accuracy = math.reward_func(queries, prompts, labels)["rewards"]
    with _lock:
        rewards = torch.tensor([_exchange(verdict) for verdict in accuracy.tolist()])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": accuracy}}


def _exchange(verdict: float) -> float:
    """Keep a verdict and give another one, which was kept before; the very first response is paid nothing."""
    if len(_waiting) < WAITING:
        paid = _random.choice(_waiting) if _waiting else 0.0
        _waiting.append(verdict)
        return paid
    index = _random.randrange(WAITING)
    paid, _waiting[index] = _waiting[index], verdict
    return paid
