"""SAPO: a smooth gate in place of the clip (arXiv:2511.20347)."""

from typing import Any

import torch

from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import MicroBatch, Terms


@settings("actor.sapo")
class Sapo:
    """How sharply the gate closes."""

    tau_pos: float = flag(1.0, "with policy loss sapo, temperature of the gate where the advantage is above 0")
    tau_neg: float = flag(1.05, "with policy loss sapo, temperature of the gate elsewhere")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        return temperature_problems("sapo", self.tau_pos, self.tau_neg, flags)


def temperature_problems(loss: str, tau_pos: float, tau_neg: float, flags: dict[str, Any]) -> list[str]:
    """Complaints about a gate's temperatures, where the loss is the chosen one."""
    if flags["actor.policy_loss_type"] != loss:
        return []
    given = {"tau_pos": tau_pos, "tau_neg": tau_neg}
    return [f"--actor.{loss}.{name} {tau}: must be above 0" for name, tau in given.items() if not tau > 0]


def gate(batch: MicroBatch, tau_pos: float, tau_neg: float) -> tuple[torch.Tensor, torch.Tensor]:
    """f(r) = (4/τ)·sigmoid(τ(r − 1)), with τ by the sign of the advantage; f(1) = 2/τ and f'(1) = 1.

    Returns:
        f with its graph, and r·f'(r) = ∂f/∂log π(y) without, shape (B, T) each.
    """
    tau = torch.where(batch.advantages > 0, tau_pos, tau_neg).to(batch.log_probs.dtype)
    ratio = batch.ratio
    opening = torch.sigmoid(tau * (ratio - 1))
    slope = (4 * ratio * opening * (1 - opening)).detach()
    return 4 / tau * opening, torch.where(batch.moving, slope, 0.0)


def sapo(batch: MicroBatch, settings: Sapo, selected: None = None) -> Terms:
    """The objective A·f(r) (SAPO, arXiv:2511.20347); C = A·r·f'(r). τ is 1.0 where A > 0 and 1.05 elsewhere."""
    value, slope = gate(batch, settings.tau_pos, settings.tau_neg)
    coefficient = batch.advantages * slope
    return Terms(-value * batch.advantages, coefficient, {"sapo_gate": batch.average(slope / batch.ratio.detach())})
