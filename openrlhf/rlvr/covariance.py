"""Clip-Cov and KL-Cov: restraining the few tokens that cost most entropy (arXiv:2505.22617).

They are told by cov_t = (log π_t − mean)(A_t − mean), the means over all response tokens of the optimizer step.
"""

from collections.abc import Sequence
from typing import Any

import torch

from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import MicroBatch, Terms
from openrlhf.rlvr.ppo import Clip, cut_off, ppo
from openrlhf.rlvr.selection import greatest, reached, scattered, table


@settings("actor.clip_cov")
class ClipCov:
    """Which tokens Clip-Cov restrains."""

    ratio: float = flag(2e-4, "share of the tokens that clip_cov detaches; at least one is")
    low: float = flag(1.0, "clip_cov chooses among tokens with a covariance above this")
    high: float = flag(5.0, "and below this")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if flags["actor.policy_loss_type"] != "clip_cov":
            return []
        found = _ratio_problems("clip_cov", self.ratio)
        if not self.low < self.high:
            found.append(f"--actor.clip_cov.low {self.low}: must be below --actor.clip_cov.high {self.high}")
        return found


@settings("actor.kl_cov")
class KlCov:
    """Which tokens KL-Cov restrains, and how much."""

    ratio: float = flag(2e-4, "share of the tokens that kl_cov penalises, at least one; the paper's: 2e-4 to 2e-3")
    coef: float = flag(1.0, "of kl_cov's penalty |log r|")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if flags["actor.policy_loss_type"] != "kl_cov":
            return []
        found = _ratio_problems("kl_cov", self.ratio)
        if not self.coef > 0:
            found.append(f"--actor.kl_cov.coef {self.coef}: must be above 0; without a penalty choose another loss")
        return found


def _ratio_problems(loss: str, ratio: float) -> list[str]:
    return [] if 0 < ratio <= 1 else [f"--actor.{loss}.ratio {ratio}: must be above 0 and at most 1"]


def covariance(log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """cov_t of all response tokens of a step; shape (N,) like both arguments, float64."""
    log_probs, advantages = log_probs.double(), advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def clip_cov_tokens(
    batches: Sequence[MicroBatch], settings: tuple[ClipCov, Clip], seed: int, group: Any = None
) -> torch.Tensor:
    """Keys of the tokens that Clip-Cov detaches; int64, shape (K,), the same on every rank.

    ratio·N of all N tokens, at least one, drawn by chance from those with low < cov < high that the clip leaves alone.

    Args:
        batches: the micro-batches of this rank.
        settings: Clip-Cov's and the clip's.
        seed: another one for each optimizer step.
        group: process group of the ranks that share the step.
    """
    own, clip = settings
    keys, log_probs, advantages, cut = table(
        batches, lambda one: (one.log_probs, one.advantages, cut_off(one, clip).to(torch.uint8)), group
    )
    if not len(keys):
        return keys
    cov = covariance(log_probs, advantages)
    candidates = keys[(cut == 0) & (cov > own.low) & (cov < own.high)]
    drawn = scattered(candidates, seed).argsort(stable=True)
    return candidates[drawn[: max(1, int(own.ratio * len(keys)))]]


def kl_cov_tokens(batches: Sequence[MicroBatch], settings: KlCov, seed: int, group: Any = None) -> torch.Tensor:
    """Keys of the tokens that KL-Cov penalises; int64, shape (K,), the same on every rank.

    The ratio·N tokens of greatest covariance, at least one; none whose covariance is not above 0. See
    ``clip_cov_tokens`` for the arguments; nothing is drawn, so that ``seed`` is ignored.
    """
    keys, log_probs, advantages = table(batches, lambda one: (one.log_probs, one.advantages), group)
    if not len(keys):
        return keys
    cov = covariance(log_probs, advantages)
    return keys[reached(cov, keys, greatest(cov, keys, max(1, int(settings.ratio * len(keys))))) & (cov > 0)]


def _chosen(batch: MicroBatch, selected: torch.Tensor) -> torch.Tensor:
    return torch.isin(batch.keys, selected) & batch.mask


def clip_cov(batch: MicroBatch, settings: tuple[ClipCov, Clip], selected: torch.Tensor) -> Terms:
    """PPO's clipped objective, with the selected tokens detached (arXiv:2505.22617); C = 0 for them, else PPO's.

    Metric ``clip_cov_detached``: the share of tokens detached.
    """
    chosen, terms = _chosen(batch, selected), ppo(batch, settings[1])
    loss = torch.where(chosen, terms.loss.detach(), terms.loss)
    metrics = {**terms.metrics, "clip_cov_detached": batch.share(chosen)}
    return Terms(loss, torch.where(chosen, 0.0, terms.coefficient), metrics)


def kl_cov(batch: MicroBatch, settings: KlCov, selected: torch.Tensor) -> Terms:
    """r·A without a clip, less coef·|log r| for the selected tokens (arXiv:2505.22617).

    C = r·A − coef·sign(log r) for these, r·A for the others. Metrics: ``kl_cov_penalised``, the share of tokens
    penalised, and ``kl_cov_penalty``, the mean of their |log r|.
    """
    chosen, terms = _chosen(batch, selected), ppo(batch, Clip(low=float("inf"), high=float("inf")))
    distance = batch.raw_log_ratio.abs()
    penalty = torch.where(chosen, settings.coef * distance, 0.0)
    pull = torch.where(chosen, settings.coef * batch.raw_log_ratio.detach().sign(), 0.0)
    metrics = {"kl_cov_penalised": batch.share(chosen), "kl_cov_penalty": batch.average(distance, chosen)}
    return Terms(terms.loss + penalty, terms.coefficient - pull, metrics)
