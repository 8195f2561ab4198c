"""Losses on log π(y) itself, with a detached weight: no token loses its gradient. CISPO and GPG."""

from typing import Any

import torch

from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import MicroBatch, Terms


@settings("actor.cispo")
class Cispo:
    """Bounds of the weight."""

    eps_low: float = flag(1.0, "cispo's weight r is at least 1 minus this; 1: no lower bound")
    eps_high: float = flag(0.28, "cispo's weight r is at most 1 plus this")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if flags["actor.policy_loss_type"] != "cispo":
            return []
        found = []
        if not 0 <= self.eps_low <= 1:
            found.append(f"--actor.cispo.eps_low {self.eps_low}: must be 0 to 1 (1: no lower bound)")
        if not self.eps_high >= 0:
            found.append(f"--actor.cispo.eps_high {self.eps_high}: must be 0 or more")
        return found


def cispo(batch: MicroBatch, settings: Cispo, selected: None = None) -> Terms:
    """sg(clip(r, 1 − ε_low, 1 + ε_high))·A·log π (CISPO, arXiv:2506.13585); C = sg(clip(r, …))·A.

    ε_low is 1 and ε_high .28. Metrics: ``cispo_bounded``, the share of tokens whose weight is not r, and ``ppo_kl``,
    the mean of −log r in nats.
    """
    ratio = batch.ratio.detach()
    weight = ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high)
    coefficient = torch.where(batch.mask, weight * batch.advantages, 0.0)
    metrics = {"cispo_bounded": batch.share(weight != ratio), "ppo_kl": batch.average(-batch.raw_log_ratio)}
    return Terms(-coefficient * batch.log_probs, coefficient, metrics)


def gpg(batch: MicroBatch, settings: None = None, selected: None = None) -> Terms:
    """A·log π (GPG, arXiv:2504.02546); C = A. Metric ``ppo_kl``, the mean of −log r in nats."""
    metrics = {"ppo_kl": batch.average(-batch.raw_log_ratio)}
    return Terms(-batch.advantages * batch.log_probs, batch.advantages.detach(), metrics)
