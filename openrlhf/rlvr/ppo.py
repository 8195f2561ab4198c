"""PPO's clipped objective with its relatives: clip-higher, dual clip, and GSPO's ratio of sequences."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from openrlhf.rlvr.micro_batch import MAX_EXPONENT, MicroBatch, Terms


@dataclass(frozen=True)
class Clip:
    """Upstream's flags ``--actor.eps_clip_low_high`` (or ``--actor.eps_clip`` for both) and ``--actor.dual_clip``.

    Args:
        low: ε_low: a negative token has no gradient where r < 1 − ε_low.
        high: ε_high: a positive token has none where r > 1 + ε_high; clip-higher (DAPO, arXiv:2503.14476) has .28.
        dual: above 1; a negative token has no gradient where r is above it (arXiv:1912.09729). None: without.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    @classmethod
    def of(cls, args: Any) -> Self:
        """The settings in upstream's parsed arguments."""
        low, high = args.actor.eps_clip_low_high or (args.actor.eps_clip,) * 2
        return cls(low, high, args.actor.dual_clip)


def cut_off(batch: MicroBatch, clip: Clip) -> torch.Tensor:
    """Where the clip leaves a token no gradient; bool, shape (B, T)."""
    return _cut(batch.ratio.detach(), batch.advantages, clip)


def _cut(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> torch.Tensor:
    cut = ((advantages > 0) & (ratio > 1 + clip.high)) | ((advantages < 0) & (ratio < 1 - clip.low))
    return cut if clip.dual is None else cut | ((advantages < 0) & (ratio > clip.dual))


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped objective, and where it has no gradient."""
    cut = _cut(ratio.detach(), advantages, clip)
    bounded = ratio.detach().clamp(1 - clip.low, 1 + clip.high)
    if clip.dual is not None:
        above = (advantages < 0) & (ratio.detach() > clip.dual)
        bounded = torch.where(above, clip.dual, bounded)
    return torch.where(cut, bounded, ratio) * advantages, cut


def ppo(batch: MicroBatch, settings: Clip, selected: None = None) -> Terms:
    """min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A) (PPO, arXiv:1707.06347, eq. 7); C = r·A, or 0 where the clip cuts.

    With dual clip, at least dual·A where A < 0. The same bits as upstream's ``PolicyLoss``. Metrics:
    ``ppo_clip_ratio``, the share of tokens without a gradient, and ``ppo_kl``, the mean of −log r in nats.
    """
    ratio, advantages = batch.ratio, batch.advantages
    objective, cut = _clipped(ratio, advantages, settings)
    coefficient = torch.where(batch.moving & ~cut, ratio.detach() * advantages, 0.0)
    return Terms(-objective, coefficient, _metrics(batch, cut))


def gspo(batch: MicroBatch, settings: Clip, selected: None = None) -> Terms:
    """PPO's objective with s = exp(mean of log r over the sequence) for r (GSPO, arXiv:2507.18071).

    A token's log π moves the objective of its whole sequence: C = s·(mean of A over those tokens that the clip leaves
    alone). Metrics as ``ppo``.
    """
    mean, advantages = batch.sequence_mean(batch.raw_log_ratio), batch.advantages
    ratio = torch.where(batch.mask, mean.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp(), 0.0)
    objective, cut = _clipped(ratio, advantages, settings)
    moving = batch.mask & (mean.detach().abs() <= MAX_EXPONENT)
    coefficient = batch.sequence_mean(torch.where(cut, 0.0, ratio.detach() * advantages))
    return Terms(-objective, torch.where(moving, coefficient, 0.0), _metrics(batch, cut))


def _metrics(batch: MicroBatch, cut: torch.Tensor) -> dict[str, Any]:
    return {"ppo_clip_ratio": batch.share(cut), "ppo_kl": batch.average(-batch.raw_log_ratio)}
