"""Metrics of the policy that an update learns: its certainty at each token, and how far it parts right from wrong."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from openrlhf.rlvr.diagnostics import gaps, mean_changes
from openrlhf.rlvr.flags import flag, settings
from openrlhf.rlvr.micro_batch import Metric, MicroBatch
from openrlhf.rlvr.statistics import responses


@settings("logger")
class PolicyMetrics:
    """Which metrics of the policy are taken."""

    policy: bool = flag(
        False,
        "metrics policy/entropy, policy/aligned and policy/uncertainty of every update; with upstream's losses they "
        "come from our statistics of tokens, which differ from upstream's in their last bits",
    )
    sharpness_steps: int | None = flag(
        None,
        "every so many training steps, measure policy/effective_sharpness by one more forward pass over the samples "
        "learnt; needs algo.allocation.strategy, which keeps their verdicts",
    )

    def problems(self, flags: dict[str, Any]) -> list[str]:
        if self.sharpness_steps is None:
            return []
        found = []
        if self.sharpness_steps < 1:
            found.append(f"--logger.sharpness_steps {self.sharpness_steps}: must be 1 or more")
        if flags["algo.allocation.strategy"] is None:
            found.append(
                "--logger.sharpness_steps: samples of a prompt are told apart, and their verdicts kept, only with "
                "--algo.allocation.strategy; uniform gives all prompts equally many"
            )
        return found


def certainty(batch: MicroBatch) -> dict[str, Metric]:
    """Means over response tokens: entropy in nats, share of tokens that are the mode, and δ = 1 − max π."""
    return {
        "policy/entropy": batch.average(batch.need("entropy")),
        "policy/aligned": batch.share(batch.need("is_mode")),
        "policy/uncertainty": batch.average(-torch.expm1(batch.need("mode_log_prob"))),
    }


@torch.no_grad()
def effective_sharpness(trainer: Any, group: Any) -> dict[str, float]:
    """κ_eff of the update that has just ended: mean over the groups with a right and a wrong sample.

    Every rank of ``group`` calls it, with equally many samples each.

    Args:
        trainer: an actor's, with the samples of the update in its buffer.
        group: process group of the data-parallel ranks; None where there is but one.

    Returns:
        ``policy/effective_sharpness`` in nats; nothing where no group has both.
    """
    rows = torch.cat(list(_changes(trainer)))
    if group is not None:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows, group=group)
        rows = torch.cat(parts)
    draws, correct, changes = rows.cpu().numpy().T
    found = gaps(changes, correct == 1, draws, (correct >= 0) & (draws >= 0))
    known = found[found == found]
    return {"policy/effective_sharpness": float(known.mean())} if len(known) else {}


def _changes(trainer: Any) -> Any:
    """Draw, verdict (−1 without one) and mean change of log-probability of each sample, by micro-batches; (B, 3)."""
    buffer, actor = trainer.replay_buffer, trainer.actor
    device = actor.model.device
    batches = DataLoader(buffer, batch_size=buffer.sample_batch_size, collate_fn=buffer.collate_fn)
    was_training = actor.training
    actor.eval()
    for experience in batches:
        new = responses(trainer, experience)
        mask = experience.action_mask.bool()
        changes = mean_changes(*(one.float().cpu().numpy() for one in (experience.action_log_probs, new, mask)))
        told = []
        for one, some, change in zip(experience.samples, mask.any(-1).tolist(), changes.tolist(), strict=True):
            verdict = -1 if one is None or one.correct is None or not some else one.correct
            told.append((-1 if one is None else one.group.draw, verdict, change))
        yield torch.tensor(told, dtype=torch.float64, device=device)
    actor.train(was_training)
