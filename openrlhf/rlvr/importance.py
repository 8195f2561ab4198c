"""Correcting for the engine's log-probabilities that differ from the trainer's, as a factor on the loss of a token.

The weight is w = π_old(y)/π_rollout(y), with both policies of the same parameters: the trainer's against the engine's
(truncated importance sampling, fengyao.notion.site/off-policy-rl).
"""

from dataclasses import dataclass
from typing import Any, Self

import torch

from openrlhf.rlvr.micro_batch import MAX_EXPONENT, Metric, MicroBatch

LEAST_PROBABILITY = 1e-6


@dataclass(frozen=True)
class Correction:
    """Upstream's flags ``--algo.advantage.is_correction_*``.

    Args:
        level: ``off``, or what is judged at once: ``token`` or ``seq``.
        mode: what is out of bounds is dropped (``mask``), or its weight is moved to the nearest bound (``clip``).
        gating: what is judged: the weight (``ratio``), or how far the two probabilities of the sampled token are apart
            (``binary_kl``, ``tv``).
        threshold: lower and upper bound.
    """

    level: str = "off"
    mode: str = "mask"
    gating: str = "ratio"
    threshold: tuple[float, float] = (0.5, 5.0)

    @classmethod
    def of(cls, args: Any) -> Self:
        """The settings in upstream's parsed arguments."""
        given = args.algo.advantage
        low, high = [0.0, *given.is_correction_threshold][-2:]
        return cls(given.is_correction_level, given.is_correction_mode, given.is_correction_gating, (low, high))


def importance_factor(batch: MicroBatch, settings: Correction) -> tuple[torch.Tensor, dict[str, Metric]]:
    """What the loss of each token is multiplied by.

    For a sequence the weight's geometric mean is judged, and a divergence's mean; tokens that stay keep their own
    weight.

    Returns:
        Factors without a graph, shape (B, T), 1 where masked; and metrics: ``vllm_kl``, the mean of
        log π_rollout − log π_old in nats, and ``is_filter_ratio``, the share of tokens or sequences out of bounds.
    """
    log_weight = (batch.old_log_probs - batch.need("rollout_log_probs")).detach()
    weight = log_weight.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    judged = _judged(batch, log_weight, settings)
    low, high = settings.threshold
    outside = (judged < low) | (judged > high)
    factor = judged.clamp(low, high) if settings.mode == "clip" else torch.where(outside, 0.0, weight)
    if settings.level == "seq":
        present = batch.mask.any(-1, keepdim=True)
        filtered = ((outside & present).sum().to(factor.dtype), present.sum())
    else:
        filtered = batch.share(outside)
    metrics = {"vllm_kl": batch.average(-log_weight), "is_filter_ratio": filtered}
    return torch.where(batch.mask, factor, 1.0), metrics


def _judged(batch: MicroBatch, log_weight: torch.Tensor, settings: Correction) -> torch.Tensor:
    """The statistic that has bounds; shape (B, T), or (B, 1) for sequences."""
    whole = settings.level == "seq"
    if settings.gating == "ratio":
        log_weight = batch.sequence_mean(log_weight) if whole else log_weight
        return log_weight.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    rollout, trained = (
        one.detach().exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
        for one in (batch.need("rollout_log_probs"), batch.old_log_probs)
    )
    if settings.gating == "tv":
        apart = (rollout - trained).abs()
    else:
        apart = rollout * (rollout / trained).log() + (1 - rollout) * ((1 - rollout) / (1 - trained)).log()
    return batch.sequence_mean(apart) if whole else apart
