"""GTPO: what right samples share with wrong ones is not unlearned, confused samples are left out (arXiv:2508.03772)."""

import math
from dataclasses import replace
from typing import Any

import torch

from openrlhf.rlvr.entropy import sequence_ratio_problems
from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.w_reinforce import verdict_problems


@settings("algo.gtpo")
class Gtpo:
    """GTPO's two changes."""

    enable: bool = flag(False, "weigh tokens in conflict 2 in right samples and 0 in wrong ones (GTPO)")
    max_entropy: float = flag(math.log(2), "with GTPO, samples of a greater mean entropy leave the loss; in nats")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if not self.enable:
            return []
        found = verdict_problems("algo.gtpo.enable", flags)
        if not self.max_entropy > 0:
            found.append(f"--algo.gtpo.max_entropy {self.max_entropy}: must be above 0 nats; inf keeps every sample")
        return found + sequence_ratio_problems("algo.gtpo.enable", flags)


def conflict_weights(
    tokens: torch.Tensor, mask: torch.Tensor, correct: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """GTPO's λ (arXiv:2508.03772): 2 for conflict tokens of right samples, 0 for those of wrong ones, else 1.

    A token is in conflict if it also stands at the same position of a sample of the group with the other verdict, and
    so do all before it, or all after it with positions counted from the end.

    Args:
        tokens: int64 ids, shape (S, T); whole groups, since one sample's weights depend on the others'.
        mask: bool or number, which places hold response tokens, shape (S, T).
        correct: bool, the verdicts, shape (S,).
        groups: integer ids, shape (S,).

    Returns:
        float32, shape (S, T), 1 where masked.
    """
    mask = mask != 0
    place = mask.long().cumsum(-1) - 1
    backwards = mask.sum(-1, keepdim=True) - 1 - place
    rows, columns = mask.nonzero(as_tuple=True)
    _, group = groups.unique(return_inverse=True)
    conflict = torch.zeros_like(mask)
    for positions, reverse in ((place, False), (backwards, True)):
        met = torch.zeros_like(mask)
        key = torch.stack([group[rows], positions[rows, columns], tokens[rows, columns]])
        _, cell = key.unique(dim=1, return_inverse=True)
        met[rows, columns] = _has_both(cell, correct[rows])
        conflict |= _unbroken(met | ~mask, reverse) & mask
    weights = torch.where(correct, 2.0, 0.0).unsqueeze(-1)
    return torch.where(conflict, weights, 1.0)


def _has_both(cell: torch.Tensor, correct: torch.Tensor) -> torch.Tensor:
    """Whether a token's cell holds tokens of right and of wrong samples; bool, shape (N,)."""
    count = int(cell.max()) + 1 if len(cell) else 0
    right = torch.zeros(count, dtype=torch.long, device=cell.device).index_add_(0, cell, correct.long())
    wrong = torch.zeros_like(right).index_add_(0, cell, (~correct).long())
    return ((right > 0) & (wrong > 0))[cell]


def _unbroken(met: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Where a row has been true from its start, or up to its end; bool, shape (S, T)."""
    met = met.flip(-1) if reverse else met
    run = met.long().cumprod(-1).bool()
    return run.flip(-1) if reverse else run


def gtpo(batch: MicroBatch, settings: Gtpo) -> MicroBatch:
    """Weigh the advantages, and take samples of too great a mean entropy out of the mask; H is detached."""
    calm = batch.sequence_mean(batch.need("entropy").detach()) <= settings.max_entropy
    advantages = batch.advantages * batch.need("conflict_weights")
    return replace(batch, advantages=advantages, mask=batch.mask & calm)
