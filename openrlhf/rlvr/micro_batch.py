"""The response tokens of a micro-batch as losses see them: in float32, zero where masked, with ratios that stay finite.

Everything here has shape (B, T), with B samples and T places of which a mask says which hold a response token, unless a
docstring says otherwise.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch

MAX_EXPONENT = 20.0
"""Log-ratios are cut off here before exp, so that a huge ratio times advantage 0 is 0; it has no gradient beyond."""

PLACE_BITS = 24

Metric = tuple[torch.Tensor, torch.Tensor]
"""A sum and what it is to be divided by, both summed over micro-batches and ranks first; scalars."""


@dataclass(frozen=True)
class MicroBatch:
    """What is known of the response tokens of some samples.

    Args:
        log_probs: log π(y) of the sampled tokens under the current policy, in nats, with its graph.
        old_log_probs: the same under the policy that the update started from.
        advantages: of the tokens.
        mask: bool or number, which places hold a response token that is learned from.
        entropy: H of the current policy over the whole vocabulary, in nats.
        is_mode: bool, whether π(y) ≥ max π − 1e-6.
        mode_log_prob: log max π; with its graph only where a method differentiates a mode that was not sampled.
        square_term: Σ_v π_v² Λ_v with Λ = log π + H.
        rollout_log_probs: log-probabilities that the engine reported while sampling.
        conflict_weights: GTPO's weights, see ``gtpo.conflict_weights``.
        samples: int64, shape (B,), 0 ≤ id < 2³⁹; the same for a sample wherever it goes, and another for each sample
            of an optimizer step. It breaks ties.
        vocabulary: number of tokens that the policy chooses from.

    Values at masked places are replaced by 0, whatever stood there; numbers below float32 become float32.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    entropy: torch.Tensor | None = None
    is_mode: torch.Tensor | None = None
    mode_log_prob: torch.Tensor | None = None
    square_term: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    conflict_weights: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        mask = self.mask != 0
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, torch.Tensor) or item.name == "samples":
                continue
            if value.is_floating_point() and item.name != "mask":
                # Selecting, not multiplying: NaN and infinity at a masked place reach neither values nor gradients.
                value = torch.where(mask, value.to(torch.promote_types(value.dtype, torch.float32)), 0.0)
            else:
                value = (value != 0) & mask
            object.__setattr__(self, item.name, value)

    def need(self, name: str) -> torch.Tensor:
        """A field that a method cannot do without.

        Raises:
            ValueError: it was not given.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"a method needs MicroBatch.{name}, which was not computed")
        return value

    def detached(self) -> Self:
        """The same without a graph."""
        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, value in given.items():
            given[name] = value.detach() if isinstance(value, torch.Tensor) else value
        return type(self)(**given)

    @property
    def raw_log_ratio(self) -> torch.Tensor:
        """log r = log π(y) − log π_old(y)."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> torch.Tensor:
        """r = π(y)/π_old(y), at most e²⁰ and at least e⁻²⁰; exactly 1 where the two are equal, and where masked."""
        return self.raw_log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()

    @property
    def moving(self) -> torch.Tensor:
        """Bool, where ``ratio`` has a gradient."""
        return self.mask & (self.raw_log_ratio.detach().abs() <= MAX_EXPONENT)

    @property
    def keys(self) -> torch.Tensor:
        """int64, one number for each response token: its sample's id and how many response tokens precede it.

        It depends neither on padding nor on which other samples share the micro-batch.
        """
        places = self.mask.long().cumsum(-1) - 1
        return (self.need("samples").to(torch.int64).unsqueeze(-1) << PLACE_BITS) + places

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over a sample's own response tokens, 0 where it has none; shape (B, 1)."""
        count = self.mask.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(self.mask, values, 0.0).sum(-1, keepdim=True) / count

    def share(self, chosen: torch.Tensor, among: torch.Tensor | None = None) -> Metric:
        """A metric: the share of chosen tokens among the response tokens, or among some of them."""
        return self.average(chosen.to(self.log_probs.dtype), among)

    def average(self, values: torch.Tensor, among: torch.Tensor | None = None) -> Metric:
        """A metric: the mean of values over the response tokens, or over some of them."""
        where = self.mask if among is None else self.mask & among
        return torch.where(where, values.detach(), 0.0).sum(), where.sum()


@dataclass(frozen=True)
class Terms:
    """What a loss makes of a micro-batch.

    Args:
        loss: of each token, with its graph, 0 where masked, shape (B, T).
        coefficient: C of ∇log π(y) in the ascent direction, detached: −∂(Σ loss)/∂log π(y), shape (B, T).
        metrics: by name.
    """

    loss: torch.Tensor
    coefficient: torch.Tensor
    metrics: dict[str, Metric]
