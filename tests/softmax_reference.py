"""Objectives of the policy losses as the papers write them, from logits by a plain softmax, for tests of ours.

``sg`` is not written as detach but as a second set of logits: finite differences then hold it still as autograd does.
"""

import math
from dataclasses import dataclass

import torch

from openrlhf.rlvr.micro_batch import MicroBatch


@dataclass
class Case:
    """A ragged batch: logits (B, T, V) and, of shape (B, T), the sampled tokens, π_old's logs, advantages, the mask."""

    logits: torch.Tensor
    tokens: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def batch(self, logits=None, **given):
        """What our losses see of it; everything has its graph."""
        stats = statistics(self.logits if logits is None else logits, self.tokens)
        samples = torch.arange(len(self.tokens))
        vocabulary = self.logits.shape[-1]
        fields = {"old_log_probs": self.old, "advantages": self.advantages, "mask": self.mask, "samples": samples}
        return MicroBatch(**{**stats, **fields, "vocabulary": vocabulary, **given})


def ragged(seed, samples=4, places=6, vocabulary=7, dtype=torch.float64, spread=0.5, advantages=None):
    """Random rows with a prompt of 0 to 2 places before the response and padding behind; one row is empty."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, places, vocabulary, generator=generator, dtype=dtype)
    log_probs = logits.log_softmax(-1)
    tokens = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=generator).view(samples, places)
    modes = torch.rand(samples, places, generator=generator) < 0.4
    tokens = torch.where(modes, logits.argmax(-1), tokens)
    taken = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    old = taken + spread * torch.randn(samples, places, generator=generator, dtype=dtype)
    if advantages is None:
        advantages = torch.randn(samples, 1, generator=generator, dtype=dtype).expand(samples, places).contiguous()
    starts = torch.randint(0, 3, (samples, 1), generator=generator)
    ends = torch.randint(3, places + 1, (samples, 1), generator=generator)
    ends[-1] = 0 if samples > 2 else places
    column = torch.arange(places)
    return Case(logits, tokens, old, advantages, (column >= starts) & (column < ends))


def statistics(logits, tokens):
    """What a pass over the logits tells of each token, each by its definition."""
    log = logits.log_softmax(-1)
    pi = log.exp()
    entropy = -(pi * log).sum(-1)
    taken = log.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    mode = log.amax(-1)
    return {
        "log_probs": taken,
        "entropy": entropy,
        "mode_log_prob": mode,
        "is_mode": (taken.exp() >= mode.exp() - 1e-6).detach(),
        "square_term": (pi**2 * (log + entropy.unsqueeze(-1))).sum(-1),
    }


def sapo_gate(ratio, advantages, tau_pos=1.0, tau_neg=1.05):
    tau = torch.where(advantages > 0, torch.tensor(tau_pos), torch.tensor(tau_neg)).to(ratio.dtype)
    return 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


def _acpo(case, logits, frozen, variant="full", tau_pos=1.0, tau_neg=1.05, offset=None, routed=None):
    here, held = statistics(logits, case.tokens), statistics(frozen, case.tokens)
    pi, ratio = here["log_probs"].exp(), (here["log_probs"] - case.old).exp()
    offset = 2 / tau_pos if offset is None else offset
    routed = 1 + 2 / tau_pos if routed is None else routed
    held_delta = 1 - held["mode_log_prob"].exp()
    share = held["entropy"] / math.log(logits.shape[-1])
    learned = 1 - pi
    of_mode = 1 - here["mode_log_prob"].exp()
    one = torch.ones_like(pi)
    # (positive, other) weights of the mode, then of other tokens.
    weights = {
        "full": (offset + learned, 1 - learned, routed * held_delta, 3 * (1 - held_delta)),
        "unrouted": (offset + of_mode, 1 - of_mode, offset + of_mode, 1 - of_mode),
        "constant": (offset * one, one, offset * one, one),
        "positive": (offset + learned, one, routed * held_delta, one),
        "negative": (one, 1 - learned, one, (1 + 2 / tau_neg) * (1 - held_delta)),
        "detached": (held_delta, 1 - held_delta) * 2,
        "detached_offset": (offset + held_delta, 1 - held_delta) * 2,
        "entropy": (share, 1 - share) * 2,
        "entropy_offset": (offset + share, 1 - share) * 2,
    }[variant]
    positive = case.advantages > 0
    of_modes, of_others = (torch.where(positive, weights[i], weights[i + 1]) for i in (0, 2))
    weight = torch.where(held["is_mode"], of_modes, of_others)
    return weight * sapo_gate(ratio, case.advantages, tau_pos, tau_neg) * case.advantages


def _per_token(name, case, logits, frozen, low=0.2, high=0.2, dual=None, chosen=None, coef=1.0, **options):
    advantages, mask = case.advantages, case.mask.to(logits.dtype)
    log = statistics(logits, case.tokens)["log_probs"]
    held = statistics(frozen, case.tokens)["log_probs"]
    ratio = (log - case.old).exp()
    if name == "acpo":
        return _acpo(case, logits, frozen, **options)
    if name == "sapo":
        return sapo_gate(ratio, advantages, **options) * advantages
    if name == "gpg":
        return advantages * log
    if name == "cispo":
        return (held - case.old).exp().clamp(1 - low, 1 + high) * advantages * log
    if name == "kl_cov":
        return ratio * advantages - coef * chosen.to(log.dtype) * (log - case.old).abs()
    if name == "gspo":
        mean = ((log - case.old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        ratio = mean.exp().expand_as(log)
    clipped = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        clipped = torch.where(advantages < 0, torch.maximum(clipped, dual * advantages), clipped)
    if name == "clip_cov":
        still = torch.minimum((held - case.old).exp(), (held - case.old).exp().clamp(1 - low, 1 + high)) * advantages
        clipped = torch.where(chosen, still, clipped)
    return clipped


def objective(name, case, logits, frozen, **options):
    """What the loss ``name`` maximises, summed over the response tokens; sg[·] is taken at the logits ``frozen``."""
    return torch.where(case.mask, _per_token(name, case, logits, frozen, **options), 0.0).sum()
