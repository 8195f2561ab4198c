"""The registry of policy losses: what ``--actor.policy_loss_type`` names.

A loss is a function (micro-batch, its settings, selected tokens or None) → ``Terms``. A new one is a function in a file
of its own and an entry of LOSSES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.rlvr import acpo as acpo_
from openrlhf.rlvr.aggregation import MODES
from openrlhf.rlvr.covariance import ClipCov, KlCov, clip_cov, clip_cov_tokens, kl_cov, kl_cov_tokens
from openrlhf.rlvr.flags import extend_choices, flag, settings
from openrlhf.rlvr.micro_batch import Terms
from openrlhf.rlvr.ppo import Clip, gspo, ppo
from openrlhf.rlvr.sapo import Sapo, sapo
from openrlhf.rlvr.score import Cispo, cispo, gpg

UPSTREAMS = ("ppo", "gspo")
"""The losses that upstream has too."""

CLIPPED = (*UPSTREAMS, "clip_cov")
"""The losses that read ``--actor.eps_clip_low_high``."""


def _no_statistics(own: Any) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True)
class Loss:
    """An entry of the registry.

    Args:
        function: (micro-batch, settings, selected) → Terms.
        settings: the loss's settings in upstream's parsed arguments.
        needs: (settings) → fields of MicroBatch beyond log_probs, old_log_probs, advantages and mask.
        select: (micro-batches of this rank, settings, seed, group) → keys of the tokens that the function treats
            apart, chosen over the whole optimizer step; None where it treats none apart.
    """

    function: Callable[[Any, Any, Any], Terms]
    settings: Callable[[Any], Any]
    needs: Callable[[Any], frozenset[str]] = _no_statistics
    select: Callable[..., torch.Tensor] | None = None


LOSSES: dict[str, Loss] = {
    "ppo": Loss(ppo, Clip.of),
    "gspo": Loss(gspo, Clip.of),
    "sapo": Loss(sapo, Sapo.of),  # type: ignore[attr-defined]
    "acpo": Loss(acpo_.acpo, acpo_.Acpo.of, acpo_.needs),  # type: ignore[attr-defined]
    "cispo": Loss(cispo, Cispo.of),  # type: ignore[attr-defined]
    "gpg": Loss(gpg, lambda args: None),
    "clip_cov": Loss(clip_cov, lambda args: (ClipCov.of(args), Clip.of(args)), select=clip_cov_tokens),  # type: ignore[attr-defined]
    "kl_cov": Loss(kl_cov, KlCov.of, select=kl_cov_tokens),  # type: ignore[attr-defined]
}

extend_choices("actor.policy_loss_type", *(name for name in LOSSES if name not in UPSTREAMS))
extend_choices("actor.loss_agg_mode", "seq-mean-token-sum-norm")


@settings("actor")
class PolicyLossOptions:
    """What holds for all losses."""

    loss_max_length: int | None = flag(
        None,
        "tokens by which --actor.loss_agg_mode seq-mean-token-sum-norm divides; default: rollout.max_new_tokens",
    )

    def problems(self, flags: dict[str, Any]) -> list[str]:
        loss, mode, dual = flags["actor.policy_loss_type"], flags["actor.loss_agg_mode"], flags["actor.dual_clip"]
        name = "actor.acpo.loss_agg_mode" if loss == "acpo" else "actor.loss_agg_mode"
        chosen = flags[name]
        found = [
            (
                dual is None or loss in UPSTREAMS,
                f"--actor.dual_clip {dual}: --actor.policy_loss_type {loss} has no dual clip; leave it out, or choose "
                f"{' or '.join(UPSTREAMS)}",
            ),
            (dual is None or dual > 1, f"--actor.dual_clip {dual}: must be above 1"),
            (
                flags["actor.eps_clip_low_high"] is None or loss in CLIPPED,
                f"--actor.eps_clip_low_high: --actor.policy_loss_type {loss} does not clip by it; leave it out, or "
                f"choose one of {', '.join(CLIPPED)}",
            ),
            (
                loss != "gspo" or mode != "seq-mean-token-sum-norm",
                f"--actor.loss_agg_mode {mode}: gspo is the mean over each sequence; give seq-mean-token-mean",
            ),
            (
                self.loss_max_length is None or self.loss_max_length >= 1,
                f"--actor.loss_max_length {self.loss_max_length}: must be 1 or more",
            ),
            (
                chosen != "seq-mean-token-sum-norm" or self.loss_max_length or flags["rollout.max_new_tokens"],
                f"--{name} {chosen} divides by a fixed length; give --rollout.max_new_tokens or "
                "--actor.loss_max_length",
            ),
        ]
        return [fault for sound, fault in found if not sound]


def aggregation(args: Any) -> tuple[str, int | None]:
    """How a run's losses of tokens become one number: the mode and the fixed length of ``aggregation.aggregate``.

    gspo is always the mean over sequences of the mean over tokens; acpo has a mode of its own.
    """
    mode = args.actor.loss_agg_mode
    if args.actor.policy_loss_type == "acpo":
        mode = args.actor.acpo.loss_agg_mode
    elif args.actor.policy_loss_type == "gspo":
        mode = "seq-mean-token-mean"
    assert mode in MODES
    return mode, args.actor.loss_max_length or args.rollout.max_new_tokens
