"""What a run says about its policy: sharpness, the reward-budgeting objective, entropy bounds, convergence.

Pure functions on numpy arrays; nothing here changes a run. Sharpness κ and the objective are of reward budgeting
(arXiv:2611.05942), the entropy envelope is of ACPO (which builds on arXiv:2511.20347).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

GRID = 400
AHEAD = 40
CONSECUTIVE = 24
DEGREE = 5


def sharpness(advantages: ArrayLike, correct: ArrayLike, groups: ArrayLike, beta: float = 0.0) -> Floats:
    """Sharpness κ = (A⁺ − A⁻)/β of each group: how far the optimum under a KL penalty parts right from wrong samples.

    The policy that is optimal with coefficient β has log π(a⁺) − log π(a⁻) greater than its reference by κ. Without a
    penalty (β = 0) there is no such optimum; then the gap A⁺ − A⁻ itself is told.

    Args:
        advantages: of samples, shape (S,).
        correct: bool, shape (S,).
        groups: ids, shape (S,), in any order.
        beta: coefficient of the KL penalty, 0 or more.

    Returns:
        By group, in the order of the sorted ids, from the mean advantages of its right and of its wrong samples; NaN
        for a group that lacks one of them.

    Raises:
        ValueError: ``beta`` is negative.
    """
    if not beta >= 0:
        raise ValueError(f"beta {beta}: must be 0 or more")
    found = gaps(advantages, correct, groups)
    return found / beta if beta else found


def effective_sharpness(
    old: ArrayLike, new: ArrayLike, mask: ArrayLike, correct: ArrayLike, groups: ArrayLike
) -> Floats:
    """Measured sharpness κ_eff: what one update adds to log π(a⁺) − log π(a⁻), by group.

    Args:
        old: log-probabilities of the sampled tokens before the update, shape (S, T).
        new: the same after it.
        mask: 1 or True where a token belongs to the response, shape (S, T); what stands elsewhere is ignored.
        correct: bool, shape (S,).
        groups: ids, shape (S,), in any order.

    Returns:
        By group, in the order of the sorted ids: the average over all pairs of a right and a wrong sample, each sample
        with the average over the tokens of its response; NaN where there is no such pair. Samples without a token of
        response are in no pair.
    """
    return gaps(mean_changes(old, new, mask), correct, groups, (np.asarray(mask) > 0).any(-1))


def mean_changes(old: ArrayLike, new: ArrayLike, mask: ArrayLike) -> Floats:
    """Mean of new − old over the response of each sample, 0 for one without a token; arguments as above, shape (S,)."""
    inside = np.asarray(mask) > 0
    change = np.subtract(new, old, where=inside, out=np.zeros(inside.shape))
    return np.asarray(change.sum(-1) / np.maximum(inside.sum(-1), 1))


def gaps(values: ArrayLike, correct: ArrayLike, groups: ArrayLike, valid: ArrayLike = True) -> Floats:
    """Mean over the right samples minus mean over the wrong ones, which is the mean over all pairs; by group.

    Args:
        values: of samples, shape (S,).
        correct: bool, shape (S,).
        groups: ids, shape (S,), in any order.
        valid: bool, shape (S,) or one for all; other samples are in no pair.

    Returns:
        In the order of the sorted ids; NaN for a group that lacks one of them.
    """
    ids, group = np.unique(np.asarray(groups), return_inverse=True)
    given, right = np.asarray(values, float), np.asarray(correct, bool)
    means = []
    for chosen in (right & valid, ~right & valid):
        count = np.bincount(group[chosen], minlength=len(ids))
        total = np.bincount(group[chosen], given[chosen], minlength=len(ids))
        means.append(np.divide(total, count, where=count > 0, out=np.full(len(ids), np.nan)))
    return np.asarray(means[0] - means[1])


def objective(solved: ArrayLike, order: int) -> Floats:
    """What reward budgeting climbs: f_n(p) = Σ_{m=1..n} (1 − (1−p)^m)/m, with n = G − 1 for groups of G samples.

    f_1 is p, and f_n tends to log p plus a constant: between the two, a prompt weighs the more the harder it is.

    Args:
        solved: probability p that a sample is right, in [0, 1], any shape.
        order: n, 0 or more.

    Returns:
        The objective, in the shape of ``solved``.
    """
    powers = np.arange(1, order + 1)
    wrong = 1 - np.asarray(solved, float)[..., None]
    return np.asarray(((1 - wrong**powers) / powers).sum(-1))


def objective_derivative(solved: ArrayLike, order: int) -> Floats:
    """df_n/dp = Σ_{m=1..n} (1−p)^(m−1), which is (1 − (1−p)^n)/p; n at p = 0. Arguments as of ``objective``.

    Times dp/dθ this is the expected Σ_j A_j ∇log π of a group of n + 1 samples.
    """
    wrong = 1 - np.asarray(solved, float)[..., None]
    return np.asarray((wrong ** np.arange(order)).sum(-1))


def entropy_envelope(uncertainty: ArrayLike, size: int) -> tuple[Floats, Floats]:
    """Least and greatest entropy of a distribution whose mode has probability 1 − δ.

    −log(1−δ) ≤ H ≤ h_b(δ) + δ·log(k−1), with h_b the binary entropy: below, as few outcomes as possible share the
    mode's probability; above, all others share δ equally.

    Args:
        uncertainty: δ = 1 − max π, in [0, 1 − 1/k], any shape.
        size: number k of outcomes (the vocabulary), 2 or more.

    Returns:
        Lower and upper bound in nats, in the shape of ``uncertainty``.

    Raises:
        ValueError: no distribution over ``size`` outcomes has such a mode.
    """
    delta = np.asarray(uncertainty, float)
    if size < 2 or not np.all((delta >= 0) & (delta <= 1 - 1 / size + 1e-12)):
        raise ValueError(f"the mode of {size} outcomes (2 or more) has a probability between 1/{size} and 1")
    lower = -np.log1p(-delta)
    logarithm = np.log(np.where(delta > 0, delta, 1.0))
    return lower, (1 - delta) * lower - delta * logarithm + delta * np.log(size - 1)


def convergence_step(steps: Sequence[float], accuracies: Sequence[float]) -> float | None:
    """The step from which accuracy no longer changes much: the reward-budgeting paper's rule.

    A polynomial of degree 5 is fitted through the points and read at 400 points between the first and the last step.
    With Δ its range there, the answer is the first of those points from which, for 24 points in a row, the curve 40
    points on differs by at most max(0.005, 0.02Δ), and nothing later is higher by more than max(0.005, 0.1Δ).

    Args:
        steps: of the evaluations, in any order.
        accuracies: between 0 and 1, one for each step.

    Returns:
        A step between the first and the last, or None if the rule never holds.

    Raises:
        ValueError: fewer than 6 different steps, which do not determine the polynomial, or a number that is not finite.
    """
    x, y = np.asarray(steps, float), np.asarray(accuracies, float)
    if x.shape != y.shape or not np.isfinite(x + y).all():
        raise ValueError("expected as many accuracies as steps, all of them finite numbers")
    if len(np.unique(x)) <= DEGREE:
        raise ValueError(f"{len(np.unique(x))} different steps do not determine a curve; {DEGREE + 1} or more do")
    centre, scale = x.mean(), x.std()
    fit = np.polynomial.polynomial.polyfit((x - centre) / scale, y, DEGREE)
    grid = np.linspace(x.min(), x.max(), GRID)
    curve = np.polynomial.polynomial.polyval((grid - centre) / scale, fit)
    spread = np.ptp(curve)
    local, remaining = max(0.005, 0.02 * spread), max(0.005, 0.1 * spread)
    still_to_come = np.maximum.accumulate(curve[::-1])[::-1] - curve
    # The last points have none 40 points on: they fail.
    settled = (np.abs(curve[AHEAD:] - curve[:-AHEAD]) <= local) & (still_to_come[:-AHEAD] <= remaining)
    runs = np.lib.stride_tricks.sliding_window_view(settled, CONSECUTIVE).all(-1)
    return float(grid[runs.argmax()]) if runs.any() else None
