"""Sums over the vocabulary from which the statistics of tokens follow, and the derivatives of those.

With e_v = exp(z_v), z_v = (x_v − max x) / temperature for logits x:

    S = Σe    E = Σez    Q = Σe²    R = Σe²z
    log π(y) = z_y − log S    H = log S − E/S    log max π = −log S    Σ_v π_v² Λ_v = (R − QE/S)/S²

The sums of two parts of the vocabulary can be added. The derivatives by x, times the temperature, are e_y − π for
log π(y), e_v* − π for log max π, and −π(log π + H) for H.
"""

from dataclasses import dataclass
from typing import Any

import torch

MODE_TOLERANCE = 1e-6
"""A sampled token is the mode if its probability is at least the greatest one minus this."""

FLOOR = -1000.0
"""Below it exp is 0 in float32 and float64; differences of logits are raised to it, so that 0 · −inf never arises."""


@dataclass(frozen=True)
class Wanted:
    """What to compute beside the log-probability of the sampled token, and what of it has a gradient.

    The log-probability always has one (where gradients are enabled and the inputs require them).
    """

    entropy: bool = False
    mode: bool = False
    square_term: bool = False
    entropy_gradient: bool = False
    mode_gradient: bool = False

    def __post_init__(self) -> None:
        for name in ("entropy", "mode"):
            if getattr(self, f"{name}_gradient") and not getattr(self, name):
                raise ValueError(f"{name}_gradient is set and {name} is not: a gradient of what is not computed")


class Sums:
    """Sums over the vocabulary for n tokens: greatest logit, S, E, Q, R (as many as are wanted), index of the mode."""

    def __init__(self, wanted: Wanted, temperature: float, like: torch.Tensor, count: int) -> None:
        dtype = _accurate(like)
        parts = 4 if wanted.square_term else 2 if wanted.entropy else 1
        self.wanted, self.temperature = wanted, temperature
        self.lowest = torch.finfo(dtype).min
        self.peak = torch.full((count,), self.lowest, dtype=dtype, device=like.device)
        self.parts = torch.zeros(parts, count, dtype=dtype, device=like.device)
        self.mode = torch.zeros(count, dtype=torch.long, device=like.device) if wanted.mode_gradient else None

    def set(self, rows: slice, logits: torch.Tensor, work: torch.Tensor) -> None:
        """Sums of ``rows`` from all their logits (rows, V); ``work``: two buffers of that shape (one for S)."""
        if self.mode is None:
            top = logits.amax(1)
        else:
            top, self.mode[rows] = logits.max(1)
        top = self.peak[rows] = top.to(self.peak.dtype).clamp_(min=self.lowest)
        z, e = work[0], work[-1]
        _differences(logits, top, self.temperature, z)
        parts = self.parts[:, rows]
        if len(parts) == 1:
            torch.sum(z.exp_(), 1, out=parts[0])
            return
        torch.exp(z.clamp_(min=FLOOR), out=e)
        torch.sum(e, 1, out=parts[0])
        torch.sum(z.mul_(e), 1, out=parts[1])
        if len(parts) == 4:
            torch.linalg.vector_norm(e, dim=1, out=parts[2]).square_()
            torch.sum(z.mul_(e), 1, out=parts[3])

    def add(self, rows: slice, other: "Sums", start: int) -> None:
        """Add to ``rows`` the sums of a part of the vocabulary that begins at ``start``."""
        mine, theirs = self.peak[rows], other.peak
        if self.mode is not None and other.mode is not None:
            self.mode[rows] = torch.where(theirs > mine, other.mode + start, self.mode[rows])
        peak = torch.maximum(mine, theirs)
        self.parts[:, rows] = self._shifted(self.parts[:, rows], mine - peak)
        self.parts[:, rows] += self._shifted(other.parts, theirs - peak)
        self.peak[rows] = peak

    def _shifted(self, parts: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """The sums relative to a greater maximum, from which the one that they had differs by ``by`` ≤ 0."""
        by = (by / self.temperature).clamp(min=FLOOR)
        scale = by.exp()
        shifted = parts * scale
        for plain, with_z in ((0, 1), (2, 3)):
            if with_z < len(parts):
                shifted[with_z] += by * shifted[plain]
        shifted[2:] *= scale
        return shifted

    def result(self, sampled: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The fields of TokenStats, given the sampled tokens and their logits."""
        wanted, total = self.wanted, self.parts[0]
        log_total = total.log()
        z = (sampled.to(total.dtype) - self.peak) / self.temperature
        if self.mode is not None:
            self.mode = torch.where(z == 0, tokens, self.mode)  # of several modes the sampled one has the gradient
        square_term = None
        if wanted.square_term:
            square_term = (self.parts[3] - self.parts[2] * self.mean()) / total**2
        return (
            z - log_total,
            log_total - self.mean() if wanted.entropy else None,
            z.exp() / total >= 1 / total - MODE_TOLERANCE if wanted.mode else None,
            -log_total if wanted.mode else None,
            square_term,
        )

    def mean(self) -> torch.Tensor:
        """Mean of z under the policy, E/S = log S − H."""
        return self.parts[1] / self.parts[0]


class Slopes:
    """Derivative of a loss by the logits, from its derivatives by the statistics of n tokens."""

    def __init__(
        self, ctx: Any, gradients: tuple[torch.Tensor | None, ...], kept: tuple[torch.Tensor | None, ...]
    ) -> None:
        peak, total, mean, tokens, mode = kept
        assert peak is not None and total is not None
        log_prob, entropy, _, mode_log_prob, _ = gradients
        self.peak, self.temperature = peak, ctx.temperature
        self.points = [
            (index, gradient / ctx.temperature)
            for index, gradient in ((tokens, log_prob), (mode, mode_log_prob))
            if index is not None and gradient is not None
        ]
        self.constant = -sum((gradient for _, gradient in self.points), torch.zeros_like(peak)) / total
        self.linear = None
        if entropy is not None and mean is not None:
            self.linear = -entropy / ctx.temperature / total
            self.constant = self.constant - self.linear * mean

    def write(self, rows: slice, logits: torch.Tensor, start: int, z: torch.Tensor, work: torch.Tensor) -> None:
        """Into ``z`` (it may be ``logits``) for these logits (rows, columns), the vocabulary's from ``start`` on."""
        _differences(logits, self.peak[rows], self.temperature, z)
        constant = self.constant[rows, None]
        if self.linear is None:
            z.exp_().mul_(constant)
        else:
            e = torch.exp(z.clamp_(min=FLOOR), out=work)
            z.mul_(self.linear[rows, None]).add_(constant).mul_(e)
        for index, gradient in self.points:
            place, inside = within(index[rows], start, z.shape[1])
            z.scatter_add_(1, place, torch.where(inside, gradient[rows, None], 0.0))


def _differences(logits: torch.Tensor, top: torch.Tensor, temperature: float, out: torch.Tensor) -> None:
    torch.sub(logits, top[:, None], out=out)
    if temperature != 1.0:
        out.div_(temperature)


def within(tokens: torch.Tensor, start: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each token in a part of the vocabulary, and whether it is there; both (n, 1)."""
    column = (tokens - start)[:, None]
    place = column.clamp(0, columns - 1)
    return place, place == column


def _accurate(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of arithmetic and statistics."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
