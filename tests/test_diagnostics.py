"""Diagnostics: the papers' numbers, and agreement with what they are defined by."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from openrlhf.rlvr.advantages import group_advantages
from openrlhf.rlvr.diagnostics import (
    convergence_step,
    effective_sharpness,
    entropy_envelope,
    objective,
    objective_derivative,
    sharpness,
)


@pytest.mark.parametrize(
    ("right", "budget", "dr_grpo", "grpo"),
    [(1, 1000, 1000, 3024), (2, 500, 1000, 2309), (4, 250, 1000, 2000), (6, 167, 1000, 2309), (7, 143, 1000, 3024)],
)
def test_sharpness_of_table_1_of_the_reward_budgeting_paper(right, budget, dr_grpo, grpo):
    rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
    groups = torch.zeros(8, dtype=torch.long)
    for estimator, printed in (("reward_budget", budget), ("dr_grpo", dr_grpo), ("group_norm", grpo)):
        advantages = group_advantages(rewards, groups, estimator, ddof=0).numpy()
        assert sharpness(advantages, rewards > 0, groups, 0.001) == pytest.approx([printed], abs=0.51)
        assert sharpness(advantages, rewards > 0, groups) == pytest.approx([printed / 1000], abs=0.00051)


def test_sharpness_is_by_group_and_unknown_where_all_samples_agree():
    found = sharpness([3.0, 1.0, 2.0, 5.0, -1.0, 7.0], [1, 1, 0, 1, 0, 1], [9, 4, 4, 9, 9, 2], 0.5)
    assert found == pytest.approx([np.nan, -2, 10], nan_ok=True)
    with pytest.raises(ValueError, match=r"beta -1: must be 0 or more"):
        sharpness([1.0, 0.0], [1, 0], [0, 0], -1)


def test_effective_sharpness_by_hand():
    """Group 1: changes of 0.2 and 0.5 on right samples, -0.1 on the wrong one; group 2 has no wrong sample."""
    old = np.log([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    new = old + np.array([[0.1, 0.3], [0.5, 9.0], [-0.3, 0.1], [1.0, 1.0]])
    mask = [[1, 1], [1, 0], [1, 1], [1, 1]]
    found = effective_sharpness(old, new, mask, [1, 1, 0, 1], [1, 1, 1, 2])
    assert found == pytest.approx([(0.2 + 0.5) / 2 + 0.1, np.nan], nan_ok=True)


@given(st.data())
def test_effective_sharpness_is_the_average_over_all_pairs(data):
    shape = (data.draw(st.integers(2, 8)), 3)
    values = st.floats(-5, 0)
    old, new = (data.draw(arrays.arrays(float, shape, elements=values)) for _ in range(2))
    mask, correct = (data.draw(arrays.arrays(bool, size)) for size in (shape, shape[0]))
    groups = data.draw(arrays.arrays(int, shape[0], elements=st.integers(0, 2)))
    old[~mask] = np.nan
    expected = []
    for group in np.unique(groups):
        used = [s for s in range(shape[0]) if groups[s] == group and mask[s].any()]
        change = {s: np.mean(new[s][mask[s]] - old[s][mask[s]]) for s in used}
        pairs = [change[a] - change[b] for a, b in product(used, used) if correct[a] and not correct[b]]
        expected.append(np.mean(pairs) if pairs else np.nan)
    assert effective_sharpness(old, new, mask, correct, groups) == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_the_optimum_under_a_penalty_has_the_effective_sharpness_that_the_advantages_say():
    """π ∝ π_old·exp(A/β) moves each one-token answer by A/β and a constant."""
    beta, advantages, correct = 0.5, np.array([0.375, 0.375, -0.125, -0.125]), np.array([1, 1, 0, 0])
    old = np.log([0.1, 0.2, 0.3, 0.4])
    new = old + advantages / beta
    new -= np.log(np.exp(new).sum())
    measured = effective_sharpness(old[:, None], new[:, None], np.ones((4, 1)), correct, np.zeros(4))
    assert measured == pytest.approx(sharpness(advantages, correct, np.zeros(4), beta))


@pytest.mark.parametrize(("p", "printed"), [(0.1, 0.469533), (0.3, 0.642352), (0.5, 0.496094), (0.9, 0.100000)])
def test_the_objectives_gradient_is_the_papers(p, printed):
    """One Bernoulli logit, eight samples: dp/dlogit is p(1−p)."""
    assert objective_derivative(p, 7) * p * (1 - p) == pytest.approx(printed, abs=5e-7)


@given(st.floats(0.001, 0.999), st.integers(1, 40))
def test_the_objective_and_its_derivative_fit(p, order):
    step = 1e-6
    slope = (objective(p + step, order) - objective(p - step, order)) / (2 * step)
    assert objective_derivative(p, order) == pytest.approx(slope, rel=1e-5)
    assert objective_derivative(p, order) == pytest.approx((1 - (1 - p) ** order) / p)


def test_ends_of_the_objective():
    harmonic = 1 + 1 / 2 + 1 / 3
    assert objective([[0, 1]], 3) == pytest.approx(np.array([[0, harmonic]]))
    assert objective_derivative([0, 1], 3).tolist() == [3, 1]
    assert objective([0.25, 0.5], 1).tolist() == [0.25, 0.5]
    assert objective(0.5, 0) == objective_derivative(0.5, 0) == 0


@pytest.mark.parametrize(("size", "widest"), [(5, 0.7178), (10, 1.1010), (100, 2.6286), (151936, 8.7609)])
def test_greatest_width_of_the_entropy_envelope(size, widest):
    lower, upper = entropy_envelope(np.linspace(0, 1 - 1 / size, 200_001), size)
    assert np.max(upper - lower) == pytest.approx(widest, abs=5e-5)


@given(arrays.arrays(float, 6, elements=st.floats(0, 12)))
def test_entropies_are_in_the_envelope(logits):
    probabilities = np.exp(logits) / np.exp(logits).sum()
    lower, upper = entropy_envelope(1 - probabilities.max(), 6)
    entropy = -np.sum(probabilities * np.log(probabilities))
    assert lower - 1e-9 <= entropy <= upper + 1e-9


def test_the_envelope_is_reached_and_closed_at_its_ends():
    lower, upper = entropy_envelope([0, 0.5, 0.75], 4)
    assert lower == pytest.approx([0, np.log(2), np.log(4)])
    assert upper == pytest.approx([0, np.log(2) + 0.5 * np.log(3), np.log(4)])
    for delta, size in ((0.76, 4), (-0.1, 4), (0.0, 1), (np.nan, 4)):
        with pytest.raises(ValueError, match="has a probability between"):
            entropy_envelope(delta, size)


X = np.arange(0, 501, 5)


@pytest.mark.parametrize(
    ("accuracies", "step"),
    [
        (0.2 + 0.4 * (1 - np.exp(-X / 50)), 152.88),
        (0.2 + 0.4 * (1 - np.exp(-X / 100)), 303.26),
        (0.2 + 0.4 * np.tanh(X / 100), 201.75),
        (np.full(len(X), 0.4), 0),
    ],
)
def test_convergence_steps_of_known_curves(accuracies, step):
    assert convergence_step(X, accuracies) == pytest.approx(step, abs=0.005)
    assert convergence_step(X[::-1], accuracies[::-1]) == pytest.approx(step, abs=0.005)
    assert convergence_step(10 * X + 7, accuracies) == pytest.approx(10 * step + 7, abs=0.05)


def test_what_still_climbs_has_not_converged():
    assert convergence_step(X, 0.2 + 0.001 * X) is None


def test_a_curve_needs_six_steps_and_finite_numbers():
    with pytest.raises(ValueError, match="5 different steps do not determine a curve; 6 or more do"):
        convergence_step([0, 1, 2, 3, 4, 4], [0.1] * 6)
    with pytest.raises(ValueError, match="all of them finite"):
        convergence_step(range(6), [0.1] * 5 + [float("nan")])
    with pytest.raises(ValueError, match="as many accuracies as steps"):
        convergence_step(range(6), [0.1] * 5)
    assert convergence_step(range(6), [0.1] * 6) == 0
