"""Other gaps between the rewards of right and wrong answers: `scaled_2.py` pays 2 for a right one, `scaled_5.py` 5.

Without a division by a standard deviation the gap decides how sharp an update is (κ study, arXiv:2611.05942).
"""

from collections.abc import Sequence
from typing import Any

from openrlhf.rlvr.rewards import math


def scaled(
    gap: float, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any
) -> dict[str, Any]:
    """As `math.reward_func`, with `gap` times its rewards; the verdicts, `scores` and `accuracy`, stay 1.0 or 0.0."""
    result = math.reward_func(queries, prompts, labels)
    return {**result, "rewards": gap * result["rewards"]}
