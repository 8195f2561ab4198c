"""W-REINFORCE: wrong samples teach ten times as much as right ones (arXiv:2506.01347)."""

from typing import Any

import torch

from openrlhf.rlvr.flags import extend_choices, flag, settings

extend_choices("algo.advantage.estimator", "w_reinforce")


@settings("algo.w_reinforce")
class WReinforce:
    """The two advantages."""

    positive: float = flag(0.1, "advantage of a right sample with the estimator w_reinforce")
    negative: float = flag(-1.0, "advantage of a wrong sample with the estimator w_reinforce")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if flags["algo.advantage.estimator"] != "w_reinforce":
            return []
        found = []
        if not self.negative < self.positive:
            found.append(f"--algo.w_reinforce.negative {self.negative}: must be below .positive {self.positive}")
        for name in ("reward.overlong_buffer_len", "reward.stop_properly_penalty_coef"):
            if flags[name] is not None:
                found.append(f"--{name}: w_reinforce goes by verdicts, not rewards; leave it out")
        return found + verdict_problems("algo.advantage.estimator w_reinforce", flags)


def verdict_problems(name: str, flags: dict[str, Any]) -> list[str]:
    """Complaint about a flag that asks which samples are right, where nothing verifies them."""
    if flags["reward.remote_url"] or flags["train.agent_func_path"]:
        return []
    return [f"--{name}: no verdicts; give --reward.remote_url or --train.agent_func_path"]


def w_reinforce(correct: torch.Tensor, settings: WReinforce, valid: torch.Tensor | None = None) -> torch.Tensor:
    """+.1 for a right sample, −1 for a wrong one, without statistics of the group (arXiv:2506.01347).

    Args:
        correct: bool, the verdicts, shape (S,).
        settings: the two advantages.
        valid: bool, shape (S,); the others (fillers, empty responses) have advantage 0.

    Returns:
        float32, shape (S,).
    """
    advantages = torch.where(correct, settings.positive, settings.negative)
    return advantages if valid is None else torch.where(valid, advantages, 0.0)
