"""Entropy as an advantage, as a reward, and as a part of the loss for some of a run's steps."""

from typing import Any

import torch

from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import MicroBatch


@settings("algo.entropy_advantage")
class EntropyAdvantage:
    """Advantages that grow with the entropy at a token (arXiv:2506.14758)."""

    enable: bool = flag(False, "add min(alpha·H, |A|/κ) to each token's advantage")
    alpha: float = flag(0.4, "alpha of the entropy advantage")
    kappa: float = flag(2.0, "κ of the entropy advantage; above 1 no advantage changes its sign")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if not self.enable:
            return []
        found = []
        if not self.alpha > 0:
            found.append(f"--algo.entropy_advantage.alpha {self.alpha}: must be above 0")
        if not self.kappa > 1:
            found.append(f"--algo.entropy_advantage.kappa {self.kappa}: must be above 1, or advantages change sign")
        return found + sequence_ratio_problems("algo.entropy_advantage.enable", flags)


@settings("actor")
class EntropyBonus:
    """How long upstream's entropy loss lasts."""

    entropy_steps: int | None = flag(
        None, "actor.entropy_coef holds in the first so many training steps and is 0 afterwards; default: in all"
    )

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if self.entropy_steps is None:
            return []
        found = _steps_problems("actor.entropy_steps", self.entropy_steps)
        if not flags["actor.entropy_coef"]:
            found.append(
                "--actor.entropy_steps: there is no entropy loss; set --actor.entropy_coef, the paper's is 0.01"
            )
        return found


@settings("algo.entropy_reward")
class EntropyReward:
    """A reward for the entropy of the policy that sampled."""

    coef: float = flag(0.0, "add so many times the mean entropy of its response, in nats, to a sample's reward")
    steps: int | None = flag(None, "the entropy reward is there in the first so many training steps; default: in all")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        found = _steps_problems("algo.entropy_reward.steps", self.steps)
        if not self.coef >= 0:
            found.append(f"--algo.entropy_reward.coef {self.coef}: must be 0 or more; the paper's is 0.01")
        if self.steps is not None and not self.coef:
            found.append(
                "--algo.entropy_reward.steps: there is no entropy reward; set --algo.entropy_reward.coef, the paper's "
                "is 0.01"
            )
        if self.coef and flags["algo.advantage.drop_zero_variance"]:
            found.append(
                "--algo.entropy_reward.coef: makes the rewards of every group differ, and "
                "--algo.advantage.drop_zero_variance would drop nothing; leave one of them out"
            )
        if self.coef and flags["algo.advantage.estimator"] == "w_reinforce":
            found.append("--algo.entropy_reward.coef: w_reinforce goes by verdicts, not rewards; choose one of the two")
        return found


def _steps_problems(name: str, steps: int | None) -> list[str]:
    return [f"--{name} {steps}: must be 1 or more"] if steps is not None and steps < 1 else []


def sequence_ratio_problems(name: str, flags: dict[str, Any]) -> list[str]:
    """Complaint about a flag that tells tokens of a sequence apart, where the loss knows only the sequence."""
    if flags["actor.policy_loss_type"] != "gspo":
        return []
    return [
        f"--{name}: weighs single tokens, but all tokens of a sequence share one ratio with --actor.policy_loss_type "
        "gspo; choose another loss, for instance ppo"
    ]


def scheduled(coef: float, steps: int | None, step: int) -> float:
    """A coefficient that holds in the first steps only.

    Args:
        coef: the coefficient; .01 in the paper's study.
        steps: how many steps it holds; None: always. The paper's: 500 of 1,000.
        step: number of the training step, from 1.
    """
    return coef if steps is None or step <= steps else 0.0


def mean_entropy(entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean H of each response, of which the reward is R + coef·(mean H) (arXiv:2611.05942).

    With reward budgeting this belongs to the shaped rewards, like a length penalty: budgets come from verified ones.

    Args:
        entropy: in nats, of the policy that sampled, shape (S, T).
        mask: response tokens, bool or number, shape (S, T).

    Returns:
        In nats, shape (S,), detached; 0 for a sample without a token.
    """
    present = mask != 0
    return torch.where(present, entropy.detach(), 0.0).sum(-1) / present.sum(-1).clamp(min=1)


def entropy_advantage(batch: MicroBatch, settings: EntropyAdvantage) -> torch.Tensor:
    """A + min(alpha·sg[H], |A|/κ) (arXiv:2506.14758), with alpha = .4 and κ = 2; shape (B, T), 0 where A is 0."""
    bonus = torch.minimum(settings.alpha * batch.need("entropy").detach(), batch.advantages.abs() / settings.kappa)
    return batch.advantages + bonus
