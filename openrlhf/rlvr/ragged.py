"""Whether a run's groups may be of different sizes, and so pass through our modules instead of upstream's."""

from typing import Any

from openrlhf.rlvr.advantages import GroupAdvantage
from openrlhf.rlvr.allocation import Allocation


def is_ragged(args: Any) -> bool:
    """True where a flag of ours asks for an allocation, a way of comparing samples, or reward budgeting."""
    return (
        Allocation.of(args).strategy is not None  # type: ignore[attr-defined]
        or args.algo.advantage.estimator == "reward_budget"
        or GroupAdvantage.of(args) != GroupAdvantage()  # type: ignore[attr-defined]
    )
