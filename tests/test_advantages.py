"""Advantages over ragged groups: the papers' numbers, a matrix's bits where sizes are equal, a slow loop elsewhere."""

from math import comb, inf, nan, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.rlvr.advantages import ESTIMATORS, GroupAdvantage, differing, group_advantages, per_group

CENTRED = ["dr_grpo", "reinforce_baseline"]
ALL = ["group_norm", *CENTRED, "rloo", "reward_budget"]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def of_one_group(rewards, estimator, **options):
    shaped = options.pop("shaped", None)
    shaped = None if shaped is None else doubles(shaped)
    groups = torch.zeros(len(rewards), dtype=torch.long)
    return group_advantages(doubles(rewards), groups, estimator, shaped=shaped, **options).tolist()


def close(expected, digits=12):
    return pytest.approx(expected, abs=0.51 * 10**-digits)


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ([1, 1, -1, -1], [0.25, 0.25, -0.25, -0.25]),
        ([1, 0], [0.5, -0.5]),
        ([2, 2, 2], [0, 0, 0]),
        ([0, 1, 3], [-1 / 3, 1 / 4 - 1 / 3, 3 / 4 - 1 / 3]),
    ],
)
def test_reward_budget_shares_one_reward_among_the_gaps(rewards, advantages):
    assert of_one_group(rewards, "reward_budget") == close(advantages)


def test_other_estimators_by_hand():
    assert set(ESTIMATORS) == set(ALL)
    for estimator in CENTRED:
        assert of_one_group([1, 0, 0, 0], estimator) == [0.75, -0.25, -0.25, -0.25]
    assert of_one_group([1, 0, 0, 0], "rloo") == close([1, -1 / 3, -1 / 3, -1 / 3])
    assert of_one_group([1, 0, 0, 0], "group_norm") == close([1.5, -0.5, -0.5, -0.5], 8)
    assert of_one_group([1, 0, 0, 0], "group_norm", ddof=0) == close([sqrt(3), *[-1 / sqrt(3)] * 3], 8)


def test_a_length_penalty_spends_no_budget_unless_asked_to():
    """An all-wrong group has nothing to share; as a reward the least penalty would get all of it."""
    rewards, shaped = [0, 0, 0, 0], [0, 0, 0, -1e-6]
    assert of_one_group(rewards, "reward_budget", shaped=shaped) == [0, 0, 0, -1e-6]
    third = 1 / 3 - 1 / 4
    assert of_one_group(rewards, "reward_budget", shaped=shaped, penalties="shaped") == close([third] * 3 + [-0.25])
    right_and_long = of_one_group([1, 0, 0, 0], "reward_budget", shaped=[0.5, 0, -1, 0])
    assert right_and_long == [0.25, -0.25, -1.25, -0.25]
    for estimator in CENTRED:
        assert of_one_group([1, 0, 0, 0], estimator, shaped=[0.5, 0, -1, 0.5]) == [0.5, 0, -1, 0.5]


@pytest.mark.parametrize(
    ("right", "budget", "dr_grpo", "grpo"),
    [
        (1, (0.875, -0.125, 1000), (0.875, -0.125, 1000), (2.6458, -0.3780, 3024)),
        (2, (0.375, -0.125, 500), (0.75, -0.25, 1000), (1.7321, -0.5774, 2309)),
        (4, (0.125, -0.125, 250), (0.5, -0.5, 1000), (1, -1, 2000)),
        (6, (0.04167, -0.125, 167), (0.25, -0.75, 1000), (0.5774, -1.7321, 2309)),
        (7, (0.01786, -0.125, 143), (0.125, -0.875, 1000), (0.3780, -2.6458, 3024)),
    ],
)
def test_table_1_of_the_reward_budgeting_paper(right, budget, dr_grpo, grpo):
    """Eight samples, β = 0.001: advantage of a right and of a wrong sample, and sharpness κ = (A⁺ − A⁻)/β."""
    rewards = [1] * right + [0] * (8 - right)
    for estimator, printed, digits in (("reward_budget", budget, 5), ("dr_grpo", dr_grpo, 5), ("group_norm", grpo, 4)):
        advantages = of_one_group(rewards, estimator, ddof=0)
        assert [advantages[0], advantages[-1]] == close(list(printed[:2]), digits)
        assert len(set(advantages)) == 2
        assert (advantages[0] - advantages[-1]) / 0.001 == close(printed[2], 0)


@pytest.mark.parametrize(("p", "printed"), [(0.1, 0.469533), (0.3, 0.642352), (0.5, 0.496094), (0.9, 0.100000)])
def test_reward_budget_climbs_the_papers_objective(p, printed):
    """One Bernoulli logit, eight samples: the expected Σ A ∇log π is ∇f₇(p), f_n(p) = Σ (1 − (1−p)^m)/m."""
    update = 0.0
    for right in range(9):
        advantages = of_one_group([1] * right + [0] * (8 - right), "reward_budget")
        scores = [1 - p] * right + [-p] * (8 - right)
        chance = comb(8, right) * p**right * (1 - p) ** (8 - right)
        update += chance * sum(a * score for a, score in zip(advantages, scores, strict=True))
    logit = torch.logit(doubles(p)).requires_grad_()
    sum((1 - (1 - logit.sigmoid()) ** m) / m for m in range(1, 8)).backward()
    assert update == close(logit.grad.item())
    assert update == close(printed, 6)


VALUES = st.integers(-16, 16).map(lambda eighths: eighths / 8)


@given(st.lists(VALUES, min_size=2, max_size=12), st.integers(-8, 8), st.integers(-8, 8), st.floats(0.01, 100))
def test_reward_budget_ignores_shift_and_scale(rewards, shift, power, scale):
    plain = of_one_group(rewards, "reward_budget")
    assert of_one_group([2.0**power * one + shift for one in rewards], "reward_budget") == plain
    assert of_one_group([scale * one - shift for one in rewards], "reward_budget") == close(plain, 9)
    assert sum(plain) == close(0) and sum(one for one in plain if one > 0) <= 1


def loop(rewards, groups, estimator, shaped, penalties, ddof, group_weight, valid):
    """Advantages one group after the other, in plain numbers."""
    members = {}
    for place, (group, counts) in enumerate(zip(groups, valid, strict=True)):
        if counts:
            members.setdefault(group, []).append(place)
    after = estimator == "reward_budget" and penalties == "after"
    result = [0.0] * len(rewards)
    for places in members.values():
        own = [(rewards if after else shaped)[place] for place in places]
        mean, n = sum(own) / len(own), len(own)
        weight = sum(map(len, members.values())) / len(members) / n if group_weight == "prompt" else 1
        for place, one in zip(places, own, strict=True):
            if n == 1 or max(own) == min(own):
                advantage = 0.0
            elif estimator == "group_norm":
                advantage = (one - mean) / (sqrt(sum((other - mean) ** 2 for other in own) / (n - ddof)) + 1e-9)
            elif estimator == "rloo":
                advantage = one - (sum(own) - one) / (n - 1)
            elif estimator == "reward_budget":
                advantage = (one - min(own)) / sum(other - min(own) for other in own) - 1 / n
            else:
                advantage = one - mean
            result[place] = weight * (advantage + (shaped[place] - rewards[place] if after else 0))
    return result


@st.composite
def batches(draw):
    """Rewards, groups and whether they count, of up to 6 ragged groups in any order, with any ids."""
    ids = draw(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=6, unique=True))
    groups = [one for one in ids for _ in range(draw(st.integers(1, 12)))]
    groups = draw(st.permutations(groups))
    count = len(groups)
    rewards = draw(st.lists(VALUES, min_size=count, max_size=count))
    shaped = [one - draw(st.integers(0, 2)) / 8 for one in rewards] if draw(st.booleans()) else rewards
    valid = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=count, max_size=count))
    return rewards, groups, shaped, valid


@pytest.mark.parametrize("estimator", ALL)
@given(batches(), st.sampled_from(["after", "shaped"]), st.sampled_from([0, 1]), st.sampled_from(["sample", "prompt"]))
def test_the_same_as_a_loop_over_groups(estimator, batch, penalties, ddof, group_weight):
    rewards, groups, shaped, valid = batch
    options = {"penalties": penalties, "ddof": ddof, "group_weight": group_weight}
    found = group_advantages(
        doubles(rewards), torch.tensor(groups), estimator, shaped=doubles(shaped), valid=torch.tensor(valid), **options
    )
    expected = loop(rewards, groups, estimator, shaped=shaped, valid=valid, **options)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-10)
    informative = differing(doubles(rewards), torch.tensor(groups), torch.tensor(valid)).tolist()
    kept = list(zip(rewards, groups, valid, strict=True))
    assert informative == [v and len({r for r, g, u in kept if g == group and u}) > 1 for _, group, v in kept]


def on_a_matrix(rows, estimator):
    """The formulas over the rows of a matrix, as a trainer with groups of one size has them."""
    if estimator == "group_norm":
        return (rows - rows.mean(-1, keepdim=True)) / (rows.std(-1, keepdim=True, correction=1) + 1e-9)
    if estimator == "rloo":
        return rows - (rows.sum(-1, keepdim=True) - rows) / (rows.shape[1] - 1)
    return rows - rows.mean(-1, keepdim=True)


@pytest.mark.parametrize("estimator", ["group_norm", *CENTRED, "rloo"])
@given(st.integers(1, 40), st.integers(2, 33), st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64]))
def test_equal_sizes_give_the_bits_of_a_reshaped_matrix(estimator, count, size, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(count, size, generator=generator, dtype=dtype)
    expected = on_a_matrix(rewards, estimator)
    ids = 7 * torch.randperm(count, generator=generator) - 50
    found = group_advantages(rewards.flatten(), ids.repeat_interleave(size), estimator)
    assert torch.equal(found, expected.flatten())
    interleaved = group_advantages(rewards.T.flatten(), ids.repeat(size), estimator)
    assert torch.equal(interleaved, expected.T.flatten())


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_reward_that_is_no_number_names_its_groups(estimator, bad):
    rewards, groups = torch.tensor([1.0, bad, 0.0, bad, 1.0, bad]), torch.tensor([3, 41, 3, 12, 41, 41])
    with pytest.raises(ValueError, match=r"not finite: \[12, 41\]$"):
        group_advantages(rewards, groups, estimator)
    with pytest.raises(ValueError, match=r"not finite: \[12, 41\]$"):
        group_advantages(torch.zeros(6), groups, estimator, shaped=rewards)
    with pytest.raises(ValueError, match=r"not finite: \[12, 41\]$"):
        group_advantages(rewards, groups, estimator, shaped=torch.zeros(6))
    without = torch.tensor([True, False, True, False, True, False])
    for options in ({}, {"shaped": rewards}, {"shaped": rewards - 1, "group_weight": "prompt"}):
        found = group_advantages(rewards, groups, estimator, valid=without, **options)
        assert torch.isfinite(found).all() and found[[1, 3, 5]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimator", ALL)
def test_a_batch_without_a_response_has_no_advantage(estimator):
    groups, none = torch.tensor([1, 1, 2]), torch.zeros(3, dtype=torch.bool)
    for group_weight in ("sample", "prompt"):
        found = group_advantages(
            torch.tensor([1.0, 0.0, 1.0]), groups, estimator, group_weight=group_weight, valid=none
        )
        assert found.tolist() == [0, 0, 0]


def test_differing_is_said_of_the_whole_group_without_invalid_samples():
    values, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0]), torch.tensor([4, 9, 9, 4, 4])
    assert differing(values, groups, torch.ones(5, dtype=torch.bool)).tolist() == [True] * 5
    valid = torch.tensor([True, True, True, True, False])
    assert differing(values, groups, valid).tolist() == [False, True, True, False, False]
    assert differing(values, groups, torch.tensor([True, True, False, False, False])).tolist() == [False] * 5


def test_reward_budget_needs_two_samples_of_a_prompt():
    def flags(estimator, samples):
        return {"algo.advantage.estimator": estimator, "rollout.n_samples_per_prompt": samples}

    (problem,) = GroupAdvantage().problems(flags("reward_budget", 1))
    assert problem.startswith("--rollout.n_samples_per_prompt") and "2 or more" in problem
    assert GroupAdvantage().problems(flags("reward_budget", 2)) == []
    assert GroupAdvantage().problems(flags("reinforce", 1)) == []


def test_r01_a_total_that_divides_by_n_is_not_regrouped():
    rewards, groups = doubles([1, 0, 1, 1, 1, 1, 0, 0]), torch.tensor([5, 5, 2, 2, 2, 2, 2, 2])
    expected = [0.707, -0.707, 0.645, 0.645, 0.645, 0.645, -1.291, -1.291]
    assert group_advantages(rewards, groups, "group_norm").tolist() == close(expected, 3)


def test_r02_a_total_that_does_not_divide_by_n_is_no_error():
    rewards, groups = doubles([1, 0, 0, 1, 1, 1, 0]), torch.tensor([8, 8, 8, 6, 6, 6, 6])
    expected = [2 / 3, -1 / 3, -1 / 3, 0.25, 0.25, 0.25, -0.75]
    assert group_advantages(rewards, groups, "dr_grpo").tolist() == close(expected)


@pytest.mark.parametrize("estimator", ALL)
def test_r03_a_group_of_one_has_no_advantage_and_no_information(estimator):
    rewards, groups = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([3, 1, 1])
    found = group_advantages(rewards, groups, estimator)
    assert found[0].item() == 0 and found[1].item() > 0.49 and found[2].item() < -0.49
    assert differing(rewards, groups, torch.ones(3, dtype=torch.bool)).tolist() == [False, True, True]


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("reward", [0.1, 0.7, 0.9])
def test_r04_rounding_noise_is_no_advantage(reward, estimator):
    for size in (3, *range(6, 33)):
        rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
        for ddof in (0, 1):
            assert group_advantages(rewards, groups, estimator, ddof=ddof).tolist() == [0] * size
        assert not differing(rewards, groups, torch.ones(size, dtype=torch.bool)).any()


@pytest.mark.parametrize("estimator", ["group_norm", *CENTRED, "rloo"])
def test_r06_close_rewards_are_as_in_a_loop(estimator):
    rows = [[1.0, 1.00001], [2.0, 2.00001], [1.0, 1.00001, 1.00002]]
    groups = torch.tensor([11, 11, 4, 4, 7, 7, 7])
    found = group_advantages(torch.tensor([one for row in rows for one in row]), groups, estimator)
    assert torch.equal(found, torch.cat([on_a_matrix(torch.tensor([row]), estimator)[0] for row in rows]))
    if estimator == "group_norm":
        assert found.abs().tolist() == pytest.approx([*[sqrt(0.5)] * 4, 1, 0, 1], abs=0.02)


@pytest.mark.parametrize(("size", "share"), [(2, 0.2952), (8, 0.7956)])
def test_r10_small_groups_seldom_differ(size, share):
    """1 − p^n − (1−p)^n of the groups, for p = 0.18."""
    rewards = (torch.rand(40000, size, generator=torch.Generator().manual_seed(10)) < 0.18).float().flatten()
    groups = torch.arange(40000).repeat_interleave(size)
    informative = differing(rewards, groups, torch.ones(40000 * size, dtype=torch.bool))
    assert informative.float().mean().item() == pytest.approx(share, abs=0.01)
    assert torch.equal(informative, group_advantages(rewards, groups, "reward_budget") != 0)


def test_r12_what_is_known_of_a_group_reaches_all_its_samples():
    """Four prompts with 1, 2, 2 and 3 samples, not side by side."""
    groups = torch.tensor([30, 10, 20, 40, 30, 40, 20, 40])
    values = torch.tensor([5.0, 7.0, 0.0, 0.0, 0.0, 9.0, 6.0, 0.0])
    valid = torch.ones(8, dtype=torch.bool)
    greatest = per_group(values, groups, lambda matrix: matrix.amax(-1, keepdim=True).expand_as(matrix), valid)
    assert greatest.tolist() == [5, 7, 6, 9, 5, 9, 6, 9]


@pytest.mark.parametrize(("group_weight", "factors"), [("sample", (1, 1)), ("prompt", (2.5, 0.625))])
def test_r17_a_sample_or_a_prompt_weighs_the_same(group_weight, factors):
    """Two and eight samples of two prompts, half of them right."""
    rewards, groups = doubles([1, 0, *[1, 0] * 4]), torch.tensor([0, 0, *[1] * 8])
    found = group_advantages(rewards, groups, "dr_grpo", group_weight=group_weight)
    assert found.tolist() == close([factors[0] / 2, -factors[0] / 2, *[factors[1] / 2, -factors[1] / 2] * 4])
    weights = [found[groups == group].abs().sum().item() for group in (0, 1)]
    assert weights == close([factors[0], 4 * factors[1]])
