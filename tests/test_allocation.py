"""Sharing a batch's samples among its prompts: as exact arithmetic has it, whatever the weights and bounds."""

import json
import pickle
from fractions import Fraction
from math import comb, floor, inf, nan, sqrt
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.rlvr.allocation import Allocation, PromptStatistics, allocate, share

# P of k right of 16, for k = 0, 2, 8, 15.
FOUR = [0, 7 / 60, 4 / 15, 0.0625]


@pytest.mark.parametrize(
    ("weights", "budget", "low", "high", "counts"),
    [
        (FOUR, 64, 8, 24, [8, 21, 24, 11]),
        ([sqrt(weight) for weight in FOUR], 64, 8, 24, [8, 18, 24, 14]),
        ([0.25, 0.25, 0.01, 0.01], 64, 8, 24, [24, 24, 8, 8]),
        ([0.25, 0.16, 0.09, 0.04], 64, 8, 24, [24, 20, 12, 8]),
        ([0.2, 0.1, 0.05], 30, 4, 20, [17, 9, 4]),
        ([0, 0, 0], 31, 8, 24, [11, 10, 10]),
        ([0.25, 0, 0], 48, 8, 24, [24, 12, 12]),
        ([3, 3, 3], 32, 8, 24, [11, 11, 10]),
        ([1, 2], 16, 8, 24, [8, 8]),
        ([9, 3, 8], 44, 6, 22, [20, 7, 17]),
        ([1, 0], 48, 8, 24, [24, 24]),
        ([1, 2, 1], 30, [10, 0, 0], [10, 30, 30], [10, 13, 7]),
        ([0, 0, 1], 30, [2, 9, 0], [20, 20, 5], [13, 12, 5]),
        ([0, 0, 1], 18, [2, 9, 0], [20, 20, 5], [4, 9, 5]),
        ([], 0, 8, 24, []),
    ],
)
def test_shares_computed_by_hand(weights, budget, low, high, counts):
    assert allocate(weights, budget, low, high).tolist() == counts


def water_level(weights, budget, low, high):
    """clip(μ·w, low, high) that sums to the budget: exact, between the corners of what it spends."""

    def at(mu):
        return [min(max(mu * weight, bottom), top) for weight, bottom, top in zip(weights, low, high, strict=True)]

    corners = {bound / weight for bounds in (low, high) for bound, weight in zip(bounds, weights, strict=True)}
    enough = min(corner for corner in corners if sum(at(corner)) >= budget)
    before = max((corner for corner in corners if corner < enough), default=enough)
    step = sum(at(enough)) - sum(at(before))
    return at(before + (enough - before) * (budget - sum(at(before))) / step) if step else at(enough)


def ideal(weights, budget, low, high):
    """Shares as fractions, before they are whole."""
    eager = [i for i, weight in enumerate(weights) if weight > 0]
    idle = [i for i, weight in enumerate(weights) if weight == 0]
    eager_full = sum(high[i] for i in eager) + sum(low[i] for i in idle) < budget
    shares = [Fraction(high[i] if eager_full else low[i]) for i in range(len(weights))]
    filled, fixed = (idle, eager) if eager_full else (eager, idle)
    if filled:
        rest = budget - sum(shares[i] for i in fixed)
        values = [Fraction(1) if eager_full else weights[i] for i in filled]
        found = water_level(values, rest, [low[i] for i in filled], [high[i] for i in filled])
        for i, value in zip(filled, found, strict=True):
            shares[i] = value
    return shares


def whole(shares, budget):
    """Rounded down, and one more for each of the largest remainders."""
    counts = [floor(one) for one in shares]
    for i in sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))[: budget - sum(counts)]:
        counts[i] += 1
    return counts


EIGHTHS = st.integers(0, 40).map(lambda eighths: Fraction(eighths, 8))
VARIANCES = st.sampled_from([Fraction(k * (g - k), g * (g - 1)) for g in (4, 7, 8, 16) for k in range(g + 1)])
# All in one batch, down to the least double.
EXTREMES = st.sampled_from([0.0, 5e-324, 1e-300, 3e-300, 1e-9, 1.0, 1e9, 1e300, 1.7e308])


def bounds_of(draw, count, alike):
    """A lower and an upper bound: integers, or lists of them."""
    if alike:
        low = draw(st.integers(0, 10))
        return low, low + draw(st.integers(0, 20))
    low = draw(st.lists(st.integers(0, 10), min_size=count, max_size=count))
    return low, [bottom + draw(st.integers(0, 20)) for bottom in low]


def each(bound, count):
    return bound if isinstance(bound, list) else [bound] * count


@st.composite
def batches(draw, weights=EIGHTHS | VARIANCES, alike=None):
    """Weights, a budget that the bounds allow, and the bounds; ``alike``: bounds are integers."""
    chosen = draw(st.lists(weights, min_size=1, max_size=9))
    low, high = bounds_of(draw, len(chosen), draw(st.booleans()) if alike is None else alike)
    budget = draw(st.integers(sum(each(low, len(chosen))), sum(each(high, len(chosen)))))
    return chosen, budget, low, high


def floats(weights):
    return [float(weight) for weight in weights]


@given(batches())
def test_the_same_as_without_rounding_errors(batch):
    weights, budget, low, high = batch
    exact = ideal(weights, budget, each(low, len(weights)), each(high, len(weights)))
    assert allocate(floats(weights), budget, low, high).tolist() == whole(exact, budget)


@given(batches(EXTREMES | st.floats(0, allow_infinity=False)))
def test_the_budget_is_spent_within_bounds_whatever_the_scale(batch):
    weights, budget, low, high = batch
    counts = allocate(weights, budget, low, high)
    assert counts.sum() == budget
    assert np.all(counts >= low) and np.all(counts <= high)


@given(batches(alike=True), st.sampled_from([1e-300, 1.0, 1e300]))
def test_who_weighs_more_gets_no_less(batch, scale):
    weights, budget, low, high = batch
    counts = allocate([scale * one for one in floats(weights)], budget, low, high)
    for i, one in enumerate(weights):
        for j, other in enumerate(weights):
            assert one <= other or counts[i] >= counts[j]


@given(batches(), st.integers(-900, 900))
def test_only_the_ratios_of_weights_matter(batch, power):
    weights, budget, low, high = batch
    scaled = np.ldexp(floats(weights), power)
    assert allocate(scaled, budget, low, high).tolist() == allocate(floats(weights), budget, low, high).tolist()


@given(batches(), st.randoms(use_true_random=False))
def test_counts_move_with_their_prompts_but_for_ties(batch, random):
    """Prompts with one remainder share as many extra samples among them as before."""
    weights, budget, low, high = batch
    low, high = each(low, len(weights)), each(high, len(weights))
    order = random.sample(range(len(weights)), len(weights))
    exact = ideal(weights, budget, low, high)
    before = allocate(floats(weights), budget, low, high)
    after = allocate([float(weights[i]) for i in order], budget, [low[i] for i in order], [high[i] for i in order])
    moved = dict(zip(order, after, strict=True))
    for remainder in {one - floor(one) for one in exact}:
        alike = [i for i, one in enumerate(exact) if one - floor(one) == remainder]
        assert sum(moved[i] for i in alike) == sum(before[i] for i in alike)
        assert all(floor(exact[i]) <= moved[i] <= floor(exact[i]) + 1 for i in alike)


@pytest.mark.parametrize(
    ("weights", "budget", "low", "high", "words"),
    [
        ([1, 1], 15, 8, 24, "2 prompts within their bounds take 16 to 48 samples, not 15"),
        ([1, 1], 49, 8, 24, "2 prompts within their bounds take 16 to 48 samples, not 49"),
        ([0, 0, 1], 4, [1, 2, 3], [9, 9, 9], "3 prompts within their bounds take 6 to 27 samples, not 4"),
        ([], 1, 8, 24, "0 prompts"),
        ([1, -0.5], 32, 8, 24, "weights .* finite .* none below 0"),
        ([1, nan], 32, 8, 24, "weights .* finite"),
        ([1, inf], 32, 8, 24, "weights .* finite"),
        ([[1, 2]], 32, 8, 24, "weights must be a list"),
        ([1, 1], 32, 17, 16, "lower bound .* at most its upper bound"),
        ([1, 1], 32, [8, 20], [24, 12], "lower bound .* at most its upper bound"),
        ([1, 1], 32, -1, 24, "lower bound must be 0 or more"),
    ],
)
def test_what_cannot_be_shared_is_said(weights, budget, low, high, words):
    with pytest.raises(ValueError, match=words):
        allocate(weights, budget, low, high)


def test_a_whole_data_set_is_shared_in_milliseconds():
    """17,000 prompts with weights and bounds of their own; the best of five, since a machine may be busy."""
    random = np.random.default_rng(7)
    weights = random.random(17000) * (random.random(17000) > 0.3)
    low, high = random.integers(4, 9, 17000), random.integers(20, 33, 17000)
    seconds = []
    for _ in range(5):
        started = perf_counter()
        counts = allocate(weights, 17000 * 16, low, high)
        seconds.append(perf_counter() - started)
    assert counts.sum() == 17000 * 16
    assert min(seconds) < 0.02


def history(*draws, decay=1.0):
    """Statistics of the prompts "0", "1", ..., each drawn once with (seen, right)."""
    statistics = PromptStatistics(decay)
    for name, (seen, right) in enumerate(draws):
        statistics.update(str(name), seen, right)
    return statistics


def weights_of(*draws, **options):
    return history(*draws).weights([str(name) for name in range(len(draws))], **options).tolist()


def test_the_weight_is_the_papers_variance_estimate():
    draws = [(16, right) for right in (0, 1, 4, 8, 12, 15, 16)]
    assert weights_of(*draws) == pytest.approx([0, 0.0625, 0.2, 4 / 15, 0.2, 0.0625, 0], rel=1e-15)
    roots = [0, 0.25, sqrt(0.2), sqrt(4 / 15), sqrt(0.2), 0.25, 0]
    assert weights_of(*draws, exponent=0.5) == pytest.approx(roots, rel=1e-15)


@pytest.mark.parametrize("seen", [4, 8, 16])
@pytest.mark.parametrize("p", [0.0, 0.03, 0.5, 0.82, 1.0])
def test_the_weight_estimates_the_variance_without_bias(seen, p):
    weights = weights_of(*[(seen, right) for right in range(seen + 1)])
    chances = [comb(seen, right) * p**right * (1 - p) ** (seen - right) for right in range(seen + 1)]
    assert np.dot(weights, chances) == pytest.approx(p * (1 - p), rel=1e-12, abs=1e-15)


def test_counts_add_up_and_older_ones_decay():
    kept, fading = history((8, 6)), history((8, 6), decay=0.5)
    for statistics in (kept, fading):
        statistics.update("0", 4, 1)
        statistics.update("0", 0, 0)  # nothing was sampled, nothing changes
        statistics.update("other", 0, 0)
        assert statistics.counts("other") == (0, 0)
    assert kept.counts("0") == (12, 7)
    assert fading.counts("0") == (8, 4)
    fading.update("0", 2, 2)
    assert fading.counts("0") == (6, 4)
    assert fading.weights(["0"]).tolist() == pytest.approx([4 * 2 / (6 * 5)])


@pytest.mark.parametrize(("seen", "right"), [(4, 5), (4, -1), (-1, 0)])
def test_impossible_verdicts_are_refused(seen, right):
    with pytest.raises(ValueError, match=f"{right} of {seen} samples"):
        PromptStatistics().update("a", seen, right)


def test_a_prompt_has_a_weight_only_after_enough_samples():
    draws = [(1, 1), (3, 1), (4, 2), (5, 1), (8, 4)]
    assert np.isnan(weights_of(*draws)).tolist() == [True, True, False, False, False]
    assert np.isnan(weights_of(*draws, min_history=5)).tolist() == [True, True, True, False, False]
    assert np.isnan(weights_of(*draws, min_history=1)).tolist() == [True, False, False, False, False]
    assert np.isnan(PromptStatistics().weights(["never", "sampled"])).all()
    assert PromptStatistics().weights([]).shape == (0,)


def test_mastered_prompts_weigh_nothing():
    draws = [(20, 16), (20, 17), (20, 18), (20, 20), (2, 2)]
    assert weights_of(*draws, mastery=0.85)[:4] == [pytest.approx(16 * 4 / 380), 0, 0, 0]
    assert np.isnan(weights_of(*draws, mastery=0.85)[4]), "too few samples to call it mastered"
    assert weights_of(*draws)[1:3] == pytest.approx([17 * 3 / 380, 18 * 2 / 380])


@pytest.mark.parametrize(
    "carry", [lambda state: json.loads(json.dumps(state)), lambda s: pickle.loads(pickle.dumps(s))]
)
def test_restored_statistics_go_on_as_if_never_stopped(carry):
    whole_run, resumed = history((8, 6), (4, 0), decay=0.75), PromptStatistics(0.75)
    whole_run.update("0", 4, 1)
    resumed.load_state_dict(carry(whole_run.state_dict()))
    for statistics in (whole_run, resumed):
        statistics.update("0", 3, 3)
        statistics.update("new", 5, 2)
        assert [statistics.counts(name) for name in ("0", "1", "new")] == [(10.5, 7.125), (4, 0), (5, 2)]
    assert resumed.state_dict() == whole_run.state_dict()


def test_a_saved_state_is_not_changed_by_what_follows():
    statistics = history((8, 6))
    saved = statistics.state_dict()
    statistics.update("0", 8, 8)
    restored = PromptStatistics()
    restored.load_state_dict(saved)
    assert restored.counts("0") == (8, 6)


def test_prompts_without_history_get_the_average_and_leave_the_rest():
    weights = np.array([nan, *FOUR, nan])
    assert share(weights, 16, 8, 24).tolist() == [16, 8, 21, 24, 11, 16]
    assert share(np.array([nan, 0.2, nan]), 16, 8, 24).tolist() == [16, 16, 16]
    assert share(np.full(5, nan), 16, 8, 24).tolist() == [16] * 5


def test_a_batch_of_mastered_prompts_spends_its_budget():
    mastered = history((16, 16), (16, 15), (8, 8)).weights(["0", "1", "2"], mastery=0.85)
    assert share(mastered, 16, 8, 24).tolist() == [16, 16, 16]
    mixed = history((16, 16), (16, 8), (16, 16)).weights(["0", "1", "2"], mastery=0.85)
    assert share(mixed, 16, 8, 24).tolist() == [12, 24, 12]


DRAWS = st.integers(0, 20).flatmap(lambda seen: st.tuples(st.just(seen), st.integers(0, seen)))


@given(
    st.lists(DRAWS, min_size=1, max_size=12),
    st.tuples(st.integers(1, 12), st.integers(0, 8), st.integers(0, 8)),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([None, 0.85]),
)
def test_any_history_spends_the_budget_exactly(draws, bounds, exponent, mastery):
    fewest, below, above = bounds
    average, most = fewest + below, fewest + below + above
    weights = np.array(weights_of(*draws, exponent=exponent, mastery=mastery))
    counts = share(weights, average, fewest, most)
    assert counts.sum() == len(draws) * average
    assert counts.min() >= fewest and counts.max() <= most
    assert all(count == average for count, (seen, _) in zip(counts, draws, strict=True) if seen < 4)


@pytest.mark.parametrize(("average", "bounds"), [(16, (8, 24)), (8, (4, 12)), (5, (2, 8)), (1, (1, 2))])
def test_bounds_follow_from_the_average_unless_told(average, bounds):
    assert Allocation("dynamic").bounds(average) == bounds
    assert Allocation("dynamic", min_samples=1, max_samples=99).bounds(average) == (1, 99)
    assert Allocation("uniform").bounds(average) == (average, average)


FLAGS = {
    "rollout.n_samples_per_prompt": 16,
    "rollout.batch_size": 32,
    "rollout.vllm_generate_batch_size": None,
    "reward.remote_url": "reward.py",
    "train.agent_func_path": None,
    "algo.advantage.estimator": "reinforce",
    "algo.dynamic_filtering_enable": False,
}


@pytest.mark.parametrize(
    ("own", "other", "named"),
    [
        ({"min_samples": 17}, {}, "--algo.allocation.min_samples 17"),
        ({"min_samples": 0}, {}, "--algo.allocation.min_samples 0"),
        ({"max_samples": 15}, {}, "--algo.allocation.max_samples 15"),
        ({"exponent": 0.0}, {}, "--algo.allocation.exponent 0.0"),
        ({"exponent": nan}, {}, "--algo.allocation.exponent nan"),
        ({"exponent": inf}, {}, "--algo.allocation.exponent inf"),
        ({"min_history": 1}, {}, "--algo.allocation.min_history 1"),
        ({"mastery": 0.0}, {}, "--algo.allocation.mastery 0.0"),
        ({"mastery": 1.01}, {}, "--algo.allocation.mastery 1.01"),
        ({"decay": 0.0}, {}, "--algo.allocation.decay 0.0"),
        ({"decay": 1.5}, {}, "--algo.allocation.decay 1.5"),
        ({"min_samples": 1}, {"algo.dynamic_filtering_enable": True}, "--algo.allocation.min_samples 1"),
        ({}, {"reward.remote_url": None}, "--algo.allocation.strategy dynamic"),
    ],
)
def test_a_bad_flag_is_named(own, other, named):
    (problem,) = Allocation("dynamic", **own).problems(FLAGS | other)
    assert problem.startswith(f"{named}:")


@pytest.mark.parametrize("strategy", [None, "uniform"])
def test_an_option_that_would_do_nothing_is_refused(strategy):
    """Whoever gives bounds and forgets the strategy believes that he allocates."""
    options = {"min_samples": 8, "exponent": 0.5}
    told = Allocation(strategy, **options).problems(FLAGS)
    assert told == [
        f"--algo.allocation.{name}: does nothing without --algo.allocation.strategy dynamic" for name in options
    ]
    assert Allocation(strategy).problems(FLAGS) == []


def test_a_history_that_decay_never_reaches_is_refused():
    (told,) = Allocation("dynamic", decay=0.5, min_history=48).problems(FLAGS)
    assert told == "--algo.allocation.min_history 48: no prompt ever has as many with --algo.allocation.decay 0.5"
    assert Allocation("dynamic", decay=0.5, min_history=47).problems(FLAGS) == []


def test_uniform_shares_need_no_verdicts():
    assert Allocation("uniform").problems(FLAGS | {"reward.remote_url": None}) == []


def test_all_bad_flags_are_named_at_once_and_good_ones_never():
    bad = Allocation("dynamic", min_samples=20, max_samples=10, min_history=0, mastery=2.0)
    named = [line.split()[0].removeprefix("--algo.allocation.") for line in bad.problems(FLAGS)]
    assert named == ["min_samples", "max_samples", "min_history", "mastery"]
    agent = {"reward.remote_url": None, "train.agent_func_path": "agent.py", "rollout.vllm_generate_batch_size": 32}
    for flags in (FLAGS, FLAGS | agent, FLAGS | {"rollout.n_samples_per_prompt": 1}):
        assert Allocation("dynamic").problems(flags) == []
    edge = Allocation("dynamic", min_samples=16, max_samples=16, exponent=0.5, min_history=2, mastery=1.0, decay=0.01)
    assert edge.problems(FLAGS) == []
