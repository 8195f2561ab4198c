"""ACPO: the weight of a token follows from how certain the policy is of its mode, and is learned where it is the mode.

ACPO builds on SAPO's gate f (arXiv:2511.20347). With δ = 1 − max π and v* the mode, the objective is A·c·f(r) with

    y = v*:   c = 2 + δ where A > 0, 1 − δ elsewhere, differentiated through π(y)
    y ≠ v*:   c = 3·sg[δ] where A > 0, 3·(1 − sg[δ]) elsewhere

so that the gradient is A·F·∇log π(y), with F⁺ = (2 + δ)·r·f' − (1 − δ)·f and F⁻ = (1 − δ)(r·f' + f) for the mode. At
r = 1 these are 3δ and (1 + 2/τ_neg)(1 − δ).
"""

from typing import Any

import torch

from openrlhf.rlvr.aggregation import MODES
from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import MicroBatch, Terms
from openrlhf.rlvr.sapo import gate, temperature_problems

VARIANTS = (
    "full",
    "unrouted",
    "constant",
    "positive",
    "negative",
    "detached",
    "detached_offset",
    "entropy",
    "entropy_offset",
)
REVERSIBLE = ("full", "unrouted", "positive")
"""Variants whose factor can change its sign for positive tokens that are the mode."""

ROUNDING = 1e-3
"""No log-probability is above 0 by more; what is claimed to be must not overflow."""


@settings("actor.acpo")
class Acpo:
    """Options of ACPO and its ablations."""

    variant: str = flag(
        "full",
        "acpo's weights of positive and of other tokens: full; unrouted (all tokens as if they were the mode); "
        "constant (2, 1); positive (2+δ, 1); negative (1, 1−δ); detached (sg δ, 1−sg δ) or, _offset, (2+sg δ, 1−sg δ); "
        "entropy and entropy_offset: these with ē = H/log|V| for δ",
        choices=VARIANTS,
    )
    tau_pos: float = flag(1.0, "with policy loss acpo, temperature of the gate where the advantage is above 0")
    tau_neg: float = flag(1.05, "with policy loss acpo, temperature of the gate elsewhere")
    scale: str = flag(
        "derived",
        "acpo's offset and weight of positive tokens that are not the mode: 2/τ_pos and 1+2/τ_pos (derived), or the "
        "paper's 2 and 3 (paper); the same for τ_pos = 1",
        choices=("derived", "paper"),
    )
    clamp: bool = flag(False, "acpo's factor of positive tokens that are the mode never falls below 0")
    loss_agg_mode: str = flag("seq-mean-token-mean", "in place of --actor.loss_agg_mode with acpo", choices=MODES)

    @property
    def offset(self) -> float:
        return 2 / self.tau_pos if self.scale == "derived" else 2.0

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if flags["actor.policy_loss_type"] != "acpo":
            return []
        found = temperature_problems("acpo", self.tau_pos, self.tau_neg, flags)
        if self.clamp and self.variant not in REVERSIBLE:
            found.append(
                f"--actor.acpo.clamp: the factor of --actor.acpo.variant {self.variant} is never below 0; leave it "
                f"out, or choose one of {', '.join(REVERSIBLE)}"
            )
        if flags["actor.loss_agg_mode"] not in ("token-mean", self.loss_agg_mode):
            found.append(
                f"--actor.loss_agg_mode {flags['actor.loss_agg_mode']}: acpo goes by --actor.acpo.loss_agg_mode "
                f"{self.loss_agg_mode}; set that one"
            )
        return found


def needs(settings: Acpo) -> frozenset[str]:
    """Statistics of the policy that a variant asks for."""
    if settings.variant.startswith("entropy"):
        return frozenset({"is_mode", "mode_log_prob", "entropy"})
    return frozenset({"is_mode", "mode_log_prob"})


def acpo(batch: MicroBatch, settings: Acpo, selected: None = None) -> Terms:
    """The objective A·c·f(r); C = A·F with F = c·r·f'(r) + f·∂c/∂log π(y).

    Variant ``unrouted`` also differentiates modes that were not sampled: there C is the coefficient of ∇log π(y) alone.
    ``mode_log_prob`` needs a graph for it, and for no other variant.

    Metrics: ``acpo_aligned``, the share of tokens that are the mode; ``acpo_reversed``, the share of positive ones of
    these with F⁺ < 0, before clamping; ``acpo_uncertainty``, the mean of δ.
    """
    advantages, aligned = batch.advantages, batch.need("is_mode")
    value, slope = gate(batch, settings.tau_pos, settings.tau_neg)
    weight, growth = _weights(batch, settings)
    factor = weight.detach() * slope + growth * value.detach()
    loss = -advantages * weight * value
    positive = aligned & (advantages > 0)
    reversed_ = positive & (factor < 0)
    if settings.clamp:
        loss = torch.where(reversed_, loss.detach(), loss)
    metrics = {
        "acpo_aligned": batch.share(aligned),
        "acpo_reversed": batch.share(reversed_, positive),
        "acpo_uncertainty": batch.average(_uncertainty(batch.need("mode_log_prob"))),
    }
    clamped = torch.where(reversed_, 0.0, factor) if settings.clamp else factor
    return Terms(loss, advantages * clamped, metrics)


def _uncertainty(log_prob: torch.Tensor) -> torch.Tensor:
    """1 − π, precise also where π is almost 1."""
    return -torch.expm1(log_prob.clamp(max=ROUNDING))


def _weights(batch: MicroBatch, settings: Acpo) -> tuple[torch.Tensor, torch.Tensor]:
    """c with its graph, and ∂c/∂log π(y) without; shape (B, T) each."""
    aligned, positive = batch.need("is_mode"), batch.advantages > 0
    of_mode = _uncertainty(batch.need("mode_log_prob"))
    if settings.variant.startswith(("detached", "entropy")):
        delta = (of_mode if settings.variant.startswith("detached") else _share_of_entropy(batch)).detach()
        offset = settings.offset if settings.variant.endswith("offset") else 0.0
        return torch.where(positive, offset + delta, 1 - delta), torch.zeros_like(delta)
    of_token = _uncertainty(batch.log_probs)
    rises, falls = settings.variant in REVERSIBLE, settings.variant in ("full", "unrouted", "negative")
    grows = torch.where(positive, rises, falls)

    def learned(delta: torch.Tensor) -> torch.Tensor:
        up = settings.offset + delta if rises else torch.full_like(delta, _constant(settings))
        return torch.where(positive, up, 1 - delta if falls else torch.ones_like(delta))

    own, slope = learned(of_token), torch.where(grows & aligned, 1 - of_token.detach(), 0.0)
    growth = torch.where(positive, -slope, slope)
    if settings.variant == "unrouted":
        return torch.where(aligned, own, learned(of_mode)), growth
    return torch.where(aligned, own, _routed(of_mode.detach(), positive, settings)), growth


def _routed(delta: torch.Tensor, positive: torch.Tensor, settings: Acpo) -> torch.Tensor:
    """Weights of tokens that are not the mode: in the branch ablations the factor that the mode has at r = 1."""
    paper = settings.scale == "paper"
    up = (3.0 if paper else 1 + 2 / settings.tau_pos) * delta
    if settings.variant not in REVERSIBLE:
        up = torch.full_like(delta, _constant(settings))
    if settings.variant == "full" or (settings.variant == "negative" and paper):
        down = 3 * (1 - delta)
    elif settings.variant == "negative":
        down = (1 + 2 / settings.tau_neg) * (1 - delta)
    else:
        down = torch.ones_like(delta)
    return torch.where(positive, up, down)


def _constant(settings: Acpo) -> float:
    """The weight of positive tokens where it does not depend on δ."""
    return settings.offset if settings.variant == "constant" else 1.0


def _share_of_entropy(batch: MicroBatch) -> torch.Tensor:
    """ē = H/log|V|."""
    if not batch.vocabulary or batch.vocabulary < 2:
        raise ValueError(f"acpo's entropy variants need the size of the vocabulary, not {batch.vocabulary}")
    return batch.need("entropy") / torch.tensor(float(batch.vocabulary), dtype=torch.float64).log().item()
