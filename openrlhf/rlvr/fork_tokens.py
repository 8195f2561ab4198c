"""80/20: only the tokens at which the policy hesitates most are learned from (arXiv:2506.01939)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.selection import Threshold, greatest, reached, table


@settings("actor.fork_tokens")
class ForkTokens:
    """Which tokens have a gradient."""

    enable: bool = flag(False, "only the tokens of greatest entropy have a gradient")
    fraction: float = flag(0.2, "share of the tokens of an optimizer step that have one, rounded up")
    normaliser: str = flag(
        "all", "tokens that the mean of the loss counts: all, or those with a gradient", choices=("all", "selected")
    )

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if not self.enable:
            return []
        found = []
        if not 0 < self.fraction < 1:
            found.append(
                f"--actor.fork_tokens.fraction {self.fraction}: must be above 0 and below 1; to learn from all tokens "
                "leave out --actor.fork_tokens.enable"
            )
        mode = "actor.acpo.loss_agg_mode" if flags["actor.policy_loss_type"] == "acpo" else "actor.loss_agg_mode"
        if self.normaliser == "selected" and flags[mode] == "seq-mean-token-sum-norm":
            found.append(
                f"--actor.fork_tokens.normaliser selected: --{mode} seq-mean-token-sum-norm divides by a fixed length; "
                "leave one of them out"
            )
        return found


def fork_threshold(batches: Sequence[MicroBatch], fraction: float, group: Any = None) -> Threshold | None:
    """What the ⌈fraction·N⌉ tokens of greatest entropy have in common, over the N of an optimizer step.

    Args:
        batches: the micro-batches of this rank, with entropy.
        fraction: above 0 and at most 1; .2 in the paper.
        group: process group of the ranks that share the step.

    Returns:
        The same on every rank; None for a step without tokens.
    """
    keys, entropy = table(batches, lambda one: (one.need("entropy"),), group)
    # Rounded first: .07·100 is above 7 in floating point.
    return greatest(entropy, keys, math.ceil(round(fraction * len(keys), 6))) if len(keys) else None


def is_fork(batch: MicroBatch, threshold: Threshold | None) -> torch.Tensor:
    """Which response tokens are forks; bool, shape (B, T)."""
    if threshold is None:
        return torch.zeros_like(batch.mask)
    return reached(batch.need("entropy").detach(), batch.keys, threshold) & batch.mask


def only_forks_learn(batch: MicroBatch, forks: torch.Tensor) -> MicroBatch:
    """The same values, with a gradient at forks only: it serves every loss, also one of whole sequences."""
    tensors = {"log_probs": batch.log_probs, "mode_log_prob": batch.mode_log_prob}
    kept: dict[str, Any] = {
        name: torch.where(forks, one, one.detach()) for name, one in tensors.items() if one is not None
    }
    return replace(batch, **kept)
