"""DynaMO's advantage modulation (arXiv:2602.19208): A_final = A·sg[comp·stab], for every token anew.

Compensation lets certain tokens of good samples count more; stabilisation lets tokens count less whose update would
change the entropy most. The extremes that both compare with are, by default, those of a whole optimizer step: then the
result depends neither on packing nor on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.rlvr.entropy import sequence_ratio_problems
from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import Metric, MicroBatch

TINY = 1e-8


@settings("algo.modulation")
class Modulation:
    """Options of the modulation."""

    enable: bool = flag(False, "modulate advantages as DynaMO does")
    terms: str = flag(
        "both", "both factors of the modulation, or one", choices=("both", "compensation", "stabilisation")
    )
    alpha: float = flag(0.4, "strength of both factors of the modulation")
    alpha_comp: float | None = flag(None, "strength of the compensation; default: alpha; the authors' script has 0.2")
    alpha_stab: float | None = flag(None, "strength of the stabilisation; default: alpha")
    gamma: float = flag(50.0, "steepness of the stabilisation")
    tau: float = flag(
        0.9, "share of the greatest entropy change where the stabilisation sets in; the authors' script: .99"
    )
    centring: str = flag(
        "exact",
        "what is subtracted from πΛ in a token's entropy change: Σπ²Λ of its logits (exact), the mean over its "
        "sequence's tokens (sequence), nothing (none)",
        choices=("exact", "sequence", "none"),
    )
    scope: str = flag(
        "minibatch",
        "the extremes that the modulation compares with: of an optimizer step on all ranks (minibatch), of a "
        "micro-batch, of a sequence",
        choices=("minibatch", "microbatch", "sequence"),
    )

    @property
    def strengths(self) -> tuple[float, float]:
        """alpha of the compensation and of the stabilisation, 0 for a factor that is off."""
        comp, stab = (self.alpha if own is None else own for own in (self.alpha_comp, self.alpha_stab))
        return (
            comp if self.enable and self.terms != "stabilisation" else 0.0,
            stab if self.enable and self.terms != "compensation" else 0.0,
        )

    @property
    def needs(self) -> frozenset[str]:
        """Fields of MicroBatch that the modulation asks for."""
        if not self.enable:
            return frozenset()
        exact = self.strengths[1] and self.centring == "exact"
        return frozenset({"entropy", "square_term"} if exact else {"entropy"})

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if not self.enable:
            return []
        prefix = "--algo.modulation"
        comp, stab = self.strengths
        found = [
            (comp >= 0, f"{prefix}.alpha_comp (or .alpha) {comp}: must be 0 or more"),
            (0 <= stab <= 1, f"{prefix}.alpha_stab (or .alpha) {stab}: must be 0 to 1"),
            (comp or stab, f"{prefix}.alpha: with strength 0 nothing is modulated; leave out {prefix}.enable"),
            (self.gamma > 0, f"{prefix}.gamma {self.gamma}: must be above 0"),
            (0 <= self.tau <= 1, f"{prefix}.tau {self.tau}: must be 0 to 1"),
        ]
        for name, left_out in (("alpha_comp", "stabilisation"), ("alpha_stab", "compensation")):
            silent = getattr(self, name) is not None and self.terms == left_out
            found.append((not silent, f"{prefix}.{name}: has no effect with {prefix}.terms {left_out}; drop one"))
        return [fault for sound, fault in found if not sound] + sequence_ratio_problems("algo.modulation.enable", flags)


@dataclass(frozen=True)
class Extremes:
    """What the modulation compares a token with: scalars, or shape (B, 1) for scope sequence.

    Args:
        entropy_min: least H of a response token, in nats; +∞ where there is none.
        entropy_max: greatest H; −∞ where there is none.
        change_max: greatest Ξ, in nats for each unit of step size; 0 where there is none.
    """

    entropy_min: torch.Tensor
    entropy_max: torch.Tensor
    change_max: torch.Tensor


def entropy_change(batch: MicroBatch, coefficient: torch.Tensor, centring: str = "exact") -> torch.Tensor:
    """Ξ = |ξ·(π_y Λ_y − Σ_v π_v² Λ_v)|: how much a logit step along ξ·(e_y − π) changes the entropy (DynaMO).

    Args:
        batch: with entropy, and square_term where ``centring`` is ``exact``.
        coefficient: ξ, the loss's own coefficient of ∇log π(y); for PPO r·A, 0 where the clip cuts it off; (B, T).
        centring: as ``--algo.modulation.centring``.

    Returns:
        Without a graph, in nats for each unit of step size, shape (B, T), 0 where masked.
    """
    log_probs = batch.log_probs.detach()
    own = log_probs.exp() * (log_probs + batch.need("entropy").detach())
    if centring == "exact":
        own = own - batch.need("square_term").detach()
    elif centring == "sequence":
        own = own - batch.sequence_mean(own)
    return torch.where(batch.mask, (coefficient * own).abs(), 0.0)


def collect(batch: MicroBatch, coefficient: torch.Tensor, settings: Modulation) -> Extremes:
    """The extremes of a micro-batch, or of each of its sequences where the scope is ``sequence``.

    Args:
        batch: as ``entropy_change`` has it.
        coefficient: ξ, shape (B, T).
        settings: the modulation's.
    """
    infinity = float("inf")
    entropy = batch.need("entropy").detach()
    low, high = torch.where(batch.mask, entropy, infinity), torch.where(batch.mask, entropy, -infinity)
    change = torch.zeros_like(entropy)
    if settings.strengths[1]:
        change = entropy_change(batch, coefficient, settings.centring)
    if settings.scope == "sequence":
        return Extremes(low.amin(-1, keepdim=True), high.amax(-1, keepdim=True), change.amax(-1, keepdim=True))
    return Extremes(low.amin(), high.amax(), change.amax())


def merge(parts: Sequence[Extremes], group: Any = None) -> Extremes:
    """The extremes of an optimizer step from those of its micro-batches (scalars) on the ranks of a process group."""
    rows = [torch.stack([-part.entropy_min, part.entropy_max, part.change_max]) for part in parts]
    greatest = torch.stack(rows).amax(0)
    if group is not None:
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
    return Extremes(-greatest[0], greatest[1], greatest[2])


def compensation(
    entropy: torch.Tensor, advantages: torch.Tensor, low: torch.Tensor, high: torch.Tensor, alpha: float = 0.4
) -> torch.Tensor:
    """1 + alpha·(H_max − H)/(H_max − H_min + 1e-8) where A > 0, else 1 (DynaMO): from 1 to 1 + alpha; shape (B, T)."""
    return torch.where(advantages > 0, 1 + alpha * (high - entropy) / (high - low + TINY), 1.0)


def stabilisation(
    change: torch.Tensor, greatest: torch.Tensor, alpha: float = 0.4, gamma: float = 50.0, tau: float = 0.9
) -> torch.Tensor:
    """(1 − alpha) + alpha/(1 + exp(gamma(x − τ))) with x = Ξ/(max Ξ + 1e-8) (DynaMO); shape (B, T).

    1 where all Ξ are 0.
    """
    # The same as 1 − alpha·sigmoid(gamma(x − τ)), which is exactly 1 for the tokens that are let be.
    brake = alpha * torch.sigmoid(gamma * (change / (greatest + TINY) - tau))
    return torch.where(greatest > 0, 1 - brake, 1.0)


def modulate(
    batch: MicroBatch, coefficient: torch.Tensor, settings: Modulation, extremes: Extremes | None = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The modulated advantages A·sg[comp·stab].

    Args:
        batch: with the fields that ``settings.needs`` names.
        coefficient: ξ, the loss's coefficient with the advantages of ``batch``, shape (B, T).
        settings: the modulation's.
        extremes: of the optimizer step, for scope ``minibatch``; the other scopes take the micro-batch's own.

    Returns:
        Advantages, shape (B, T); and metrics: ``modulation_compensation`` and ``modulation_stabilisation``, the mean
        factors (of tokens with A > 0, and of all), and ``modulation_stabilised``, the share of tokens beyond τ.
    """
    if extremes is None or settings.scope != "minibatch":
        extremes = collect(batch, coefficient, settings)
    alpha_comp, alpha_stab = settings.strengths
    factor = torch.ones_like(batch.advantages)
    metrics = {}
    if alpha_comp:
        entropy, low, high = batch.need("entropy").detach(), extremes.entropy_min, extremes.entropy_max
        comp = compensation(entropy, batch.advantages, low, high, alpha_comp)
        metrics["modulation_compensation"] = batch.average(comp, batch.advantages > 0)
        factor = factor * comp
    if alpha_stab:
        change = entropy_change(batch, coefficient, settings.centring)
        stab = stabilisation(change, extremes.change_max, alpha_stab, settings.gamma, settings.tau)
        metrics["modulation_stabilisation"] = batch.average(stab)
        metrics["modulation_stabilised"] = batch.share(stab < 1 - alpha_stab / 2)
        factor = factor * stab
    return batch.advantages * factor, metrics
