"""One update's objective: every method that a run's flags choose, in their order, on micro-batches of its tokens.

    GTPO, entropy advantage → fork tokens → selection (Clip-Cov, KL-Cov) → modulation → loss → importance sampling

Clip-Cov and KL-Cov choose by the advantages before the modulation, since it goes by the coefficients of what is chosen.

What must be known of the whole optimizer step is gathered first by ``Objective.summarise``, on every rank and from all
its micro-batches; ``Objective.terms`` then gives the losses of one micro-batch's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist

from openrlhf.rlvr.entropy import EntropyAdvantage, entropy_advantage
from openrlhf.rlvr.fork_tokens import ForkTokens, fork_threshold, is_fork, only_forks_learn
from openrlhf.rlvr.gtpo import Gtpo, gtpo
from openrlhf.rlvr.importance import Correction, importance_factor
from openrlhf.rlvr.micro_batch import Metric, MicroBatch, Terms
from openrlhf.rlvr.modulation import Extremes, Modulation, collect, merge, modulate
from openrlhf.rlvr.policy_losses import LOSSES
from openrlhf.rlvr.selection import Threshold


@dataclass(frozen=True)
class Summary:
    """What is known of a whole optimizer step, the same on every rank.

    Args:
        forks: which tokens are forks, where only they learn.
        selected: keys of the tokens that the loss treats apart; None where it treats none apart.
        extremes: what the modulation compares with.
        tokens: share of the step's tokens that count in the loss: what its ``batch_num_tokens`` is to be multiplied by.
        samples: the same of samples, for ``global_batch_size``.
    """

    forks: Threshold | None = None
    selected: torch.Tensor | None = None
    extremes: Extremes | None = None
    tokens: float = 1.0
    samples: float = 1.0


@dataclass(frozen=True)
class Objective:
    """The methods of a run.

    Args:
        loss: a key of LOSSES.
        options: that loss's settings.
        correction: of the engine's log-probabilities. With gspo it has no factor: the ratio is taken against them.
    """

    loss: str
    options: Any
    modulation: Modulation
    forks: ForkTokens
    entropy: EntropyAdvantage
    gtpo: Gtpo
    correction: Correction

    @classmethod
    def of(cls, args: Any) -> Self:
        """The methods that upstream's parsed arguments choose."""
        name = args.actor.policy_loss_type
        classes: tuple[Any, ...] = (Modulation, ForkTokens, EntropyAdvantage, Gtpo, Correction)
        return cls(name, LOSSES[name].settings(args), *(one.of(args) for one in classes))

    @property
    def needs(self) -> frozenset[str]:
        """Fields of MicroBatch beyond log_probs, old_log_probs, advantages and mask that the methods read."""
        conditional = {
            "entropy": self.forks.enable or self.entropy.enable or self.gtpo.enable,
            "conflict_weights": self.gtpo.enable,
            "rollout_log_probs": self.correction.level != "off",
            "samples": self.forks.enable or LOSSES[self.loss].select is not None,
        }
        wanted = {name for name, condition in conditional.items() if condition}
        return LOSSES[self.loss].needs(self.options) | self.modulation.needs | wanted

    @property
    def needs_summary(self) -> bool:
        """Whether ``terms`` depends on the whole optimizer step."""
        modulated = self.modulation.enable and self.modulation.scope == "minibatch"
        return modulated or self.forks.enable or self.gtpo.enable or LOSSES[self.loss].select is not None

    @torch.no_grad()
    def summarise(self, batches: Sequence[MicroBatch], seed: int = 0, group: Any = None) -> Summary:
        """Gather what must be known of an optimizer step; every rank of the group calls it.

        Args:
            batches: all micro-batches of the step on this rank, at least one.
            seed: another one for each optimizer step, the same on all ranks.
            group: process group of the data-parallel ranks; None where there is but one.
        """
        if not self.needs_summary:
            return Summary()
        given = [batch.detached() for batch in batches]
        kept = [self._advantages(batch) for batch in given]
        forks = fork_threshold(kept, self.forks.fraction, group) if self.forks.enable else None
        select, selected = LOSSES[self.loss].select, None
        if select is not None:
            selected = select(kept, self.options, seed, group)
        summary = Summary(forks, selected)
        extremes = None
        if self.modulation.enable and self.modulation.scope == "minibatch":
            ready = [self._learned(batch, summary) for batch in kept]
            parts = [collect(one, self._losses(one, summary).coefficient, self.modulation) for one in ready]
            extremes = merge(parts, group)
        tokens, samples = _shares(given, [self._counted(batch, summary) for batch in kept], group)
        return replace(summary, extremes=extremes, tokens=tokens, samples=samples)

    def terms(self, batch: MicroBatch, summary: Summary) -> tuple[Terms, torch.Tensor]:
        """Losses of the tokens of a micro-batch, with their graph.

        Args:
            batch: with the fields that ``needs`` names.
            summary: of the optimizer step that the micro-batch is part of.

        Returns:
            The terms (their coefficient without the factor of importance sampling), and which tokens count in the
            aggregated loss: bool, shape (B, T).
        """
        kept = self._advantages(batch)
        ready = self._learned(kept, summary)
        metrics: dict[str, Metric] = {}
        if self.modulation.enable:
            coefficient = self._losses(ready.detached(), summary).coefficient
            advantages, metrics = modulate(ready, coefficient, self.modulation, summary.extremes)
            ready = replace(ready, advantages=advantages)
        terms = self._losses(ready, summary)
        loss, corrected = self._corrected(terms.loss, ready)
        metrics |= terms.metrics | corrected | self._metrics(batch, kept, summary)
        return replace(terms, loss=loss, metrics=metrics), self._counted(kept, summary)

    def _advantages(self, batch: MicroBatch) -> MicroBatch:
        """Entropy advantages first: GTPO's weights then hold for the whole advantage."""
        if self.entropy.enable:
            batch = replace(batch, advantages=entropy_advantage(batch, self.entropy))
        return gtpo(batch, self.gtpo) if self.gtpo.enable else batch

    def _learned(self, batch: MicroBatch, summary: Summary) -> MicroBatch:
        return only_forks_learn(batch, is_fork(batch, summary.forks)) if self.forks.enable else batch

    def _losses(self, batch: MicroBatch, summary: Summary) -> Terms:
        if self.loss == "gspo" and self.correction.level != "off":
            batch = replace(batch, old_log_probs=batch.need("rollout_log_probs"))
        terms = LOSSES[self.loss].function(batch, self.options, summary.selected)
        if not self.forks.enable:
            return terms
        return replace(terms, coefficient=torch.where(is_fork(batch, summary.forks), terms.coefficient, 0.0))

    def _corrected(self, loss: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        if self.correction.level == "off" or self.loss == "gspo":
            return loss, {}
        factor, metrics = importance_factor(batch, self.correction)
        return loss * factor, metrics

    def _counted(self, batch: MicroBatch, summary: Summary) -> torch.Tensor:
        if self.forks.enable and self.forks.normaliser == "selected":
            return is_fork(batch, summary.forks)
        return batch.mask

    def _metrics(self, given: MicroBatch, kept: MicroBatch, summary: Summary) -> dict[str, Metric]:
        """What the methods before the loss did."""
        metrics: dict[str, Metric] = {}
        if self.entropy.enable:
            metrics["entropy_advantage"] = given.average(entropy_advantage(given, self.entropy) - given.advantages)
        if self.gtpo.enable:
            metrics["gtpo_conflict"] = given.share(given.need("conflict_weights") != 1)
            metrics["gtpo_left_out"] = given.share(~kept.mask)
        if self.forks.enable:
            metrics["fork_tokens"] = kept.share(is_fork(kept, summary.forks))
        return metrics


def _shares(given: Sequence[MicroBatch], counted: Sequence[torch.Tensor], group: Any = None) -> tuple[float, float]:
    """Shares of tokens, and of samples with a token, that count in the loss, over an optimizer step; 1 without any."""
    masks = [batch.mask for batch in given]
    counts = torch.stack([_counts(masks), _counts(counted)])
    if group is not None:
        dist.all_reduce(counts, group=group)
    (tokens, samples), (tokens_counted, samples_counted) = counts.tolist()
    # None left is no division by zero: the loss is then 0 over the normaliser as it was.
    return tokens_counted / tokens if tokens_counted else 1.0, samples_counted / samples if samples_counted else 1.0


def _counts(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tokens, and rows with a token; int64, shape (2,)."""
    pairs = [torch.stack([mask.sum(), mask.any(-1).sum()]) for mask in masks]
    return torch.stack(pairs).sum(0)
