"""GTPO: which tokens are in conflict, what they weigh, and which samples leave the loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.rlvr.gtpo import Gtpo, conflict_weights, gtpo
from openrlhf.rlvr.micro_batch import MicroBatch


def weights(rows, correct, groups=None, left=0):
    """Weights of ragged responses, each with ``left`` places of something else before it."""
    width = left + max(map(len, rows))
    tokens, mask = torch.full((len(rows), width), 99), torch.zeros(len(rows), width)
    for place, row in enumerate(rows):
        tokens[place, left : left + len(row)] = torch.tensor(row)
        mask[place, left : left + len(row)] = 1
    groups = torch.tensor(groups or [5] * len(rows))
    found = conflict_weights(tokens, mask, torch.tensor(correct), groups)
    assert (found[mask == 0] == 1).all()
    return [found[place, left : left + len(row)].tolist() for place, row in enumerate(rows)]


@pytest.mark.parametrize("left", [0, 3])
def test_what_stands_in_both_weighs_two_or_nothing(left):
    """A common start and a common end, of different lengths; the same token in the middle does not count."""
    right, wrong = [1, 2, 7, 5, 8, 9], [1, 2, 3, 5, 4, 4, 8, 9]
    found = weights([right, wrong], [True, False], left=left)
    assert found == [[2, 2, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 0, 0]]


def test_samples_of_one_verdict_and_of_other_groups_are_no_conflict():
    assert weights([[1, 2], [1, 2]], [True, True]) == [[1, 1], [1, 1]]
    assert weights([[1, 2], [1, 2]], [True, False], [4, 9]) == [[1, 1], [1, 1]]
    assert weights([[1, 2], [1, 3], [1, 2]], [True, False, True], [4, 9, 9]) == [[1, 1], [0, 1], [2, 1]]


def test_a_run_may_pass_from_one_opponent_to_another():
    """Position by position: the same token in some sample of the other verdict."""
    found = weights([[1, 2, 3, 6], [1, 8, 8, 7], [9, 2, 3, 5]], [True, False, False])
    assert found == [[2, 2, 2, 1], [0, 1, 1, 1], [1, 1, 1, 1]]


def test_samples_that_are_alike_throughout():
    assert weights([[3], [3]], [True, False]) == [[2], [0]]
    assert weights([[3, 3, 3], [3, 3]], [False, True]) == [[0, 0, 0], [2, 2]]
    assert weights([[3], []], [True, False]) == [[1], []]


def by_loop(rows, correct, groups):
    """The definition, position by position."""

    def run(i, positions, place_of):
        kept = []
        for position in positions:
            place = place_of(rows[i], position)
            others = [
                rows[j]
                for j in range(len(rows))
                if groups[j] == groups[i] and correct[j] != correct[i] and position < len(rows[j])
            ]
            if not any(one[place_of(one, position)] == rows[i][place] for one in others):
                break
            kept.append(place)
        return kept

    found = []
    for i, row in enumerate(rows):
        forward = run(i, range(len(row)), lambda one, position: position)
        backward = run(i, range(len(row)), lambda one, position: len(one) - 1 - position)
        conflict = set(forward) | set(backward)
        found.append([(2 if correct[i] else 0) if place in conflict else 1 for place in range(len(row))])
    return found


@given(st.data())
def test_the_same_as_a_loop_over_positions(data):
    count = data.draw(st.integers(1, 7))
    rows = data.draw(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=count, max_size=count))
    rows[0] = rows[0] or [1]
    correct = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    groups = data.draw(st.lists(st.sampled_from([3, 2**40]), min_size=count, max_size=count))
    assert weights(rows, correct, groups) == by_loop(rows, correct, groups)


def test_samples_of_a_mean_entropy_above_ln_2_leave_the_loss():
    ln2 = math.log(2)
    entropy = torch.tensor([[ln2, ln2, 90.0], [0.1, 2.0, 0.1], [0.7, 0.6, 0.5], [9.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    advantages = torch.ones(4, 3, dtype=torch.float64)
    weights_ = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    batch = MicroBatch(advantages, advantages, advantages, mask, entropy=entropy, conflict_weights=weights_)
    found = gtpo(batch, Gtpo(enable=True))
    assert found.mask.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert found.advantages.tolist() == [[2, 1, 0], [0, 0, 0], [0, 1, 2], [0, 0, 0]]
    everything = gtpo(batch, Gtpo(enable=True, max_entropy=math.inf))
    assert torch.equal(everything.mask, batch.mask)


@pytest.mark.parametrize(
    ("options", "given", "named"),
    [
        ({"max_entropy": 0.0}, {}, ["--algo.gtpo.max_entropy", "inf"]),
        ({}, {"actor.policy_loss_type": "gspo"}, ["--algo.gtpo.enable", "--actor.policy_loss_type gspo"]),
        ({}, {"reward.remote_url": None}, ["--algo.gtpo.enable", "--reward.remote_url"]),
    ],
)
def test_senseless_settings_are_refused_by_name(options, given, named):
    flags = {"actor.policy_loss_type": "ppo", "reward.remote_url": "r.py", "train.agent_func_path": None, **given}
    (problem,) = Gtpo(enable=True, **options).problems(flags)
    assert all(name in problem for name in named)
    assert Gtpo(**options).problems(flags) == []
    assert Gtpo(enable=True).problems({**flags, "actor.policy_loss_type": "ppo", "reward.remote_url": "r.py"}) == []
