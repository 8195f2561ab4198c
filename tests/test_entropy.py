"""Entropy as advantage, reward and part of the loss."""

import math

import pytest
import torch

from openrlhf.rlvr.entropy import (
    EntropyAdvantage,
    EntropyBonus,
    EntropyReward,
    entropy_advantage,
    mean_entropy,
    scheduled,
)
from openrlhf.rlvr.micro_batch import MicroBatch

FLAGS = {
    "actor.policy_loss_type": "ppo",
    "actor.entropy_coef": 0.01,
    "algo.advantage.estimator": "group_norm",
    "algo.advantage.drop_zero_variance": False,
}


@pytest.mark.parametrize(
    ("advantage", "entropy", "expected"), [(1, 0.3, 1.12), (1, 2, 1.5), (-1, 2, -0.5), (-1, 0.3, -0.88), (0, 2, 0)]
)
def test_entropy_advantages_by_numbers(advantage, entropy, expected):
    entropy = torch.tensor([[float(entropy)]], requires_grad=True)
    zeros = torch.zeros(1, 1)
    batch = MicroBatch(zeros, zeros, torch.tensor([[float(advantage)]]), torch.ones(1, 1), entropy=entropy)
    found = entropy_advantage(batch, EntropyAdvantage(enable=True))
    assert found.item() == pytest.approx(expected) and not found.requires_grad
    assert entropy_advantage(batch, EntropyAdvantage(alpha=0.0)).item() == advantage


def test_the_mean_entropy_of_a_response_leaves_out_what_is_masked():
    entropy = torch.tensor([[1.0, 3.0, math.nan], [math.nan, 5.0, math.inf], [1.0, 1.0, 1.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    found = mean_entropy(entropy, mask)
    assert found.tolist() == [2.0, 5.0, 0.0] and not found.requires_grad


def test_a_coefficient_for_the_first_500_of_1000_steps():
    found = [scheduled(0.01, 500, step) for step in range(1, 1001)]
    assert found == [0.01] * 500 + [0.0] * 500
    assert scheduled(0.01, None, 10**9) == 0.01


@pytest.mark.parametrize(
    ("own", "given", "named"),
    [
        (EntropyAdvantage(enable=True, alpha=0.0), {}, ["--algo.entropy_advantage.alpha"]),
        (EntropyAdvantage(enable=True, kappa=1.0), {}, ["--algo.entropy_advantage.kappa"]),
        (
            EntropyAdvantage(enable=True),
            {"actor.policy_loss_type": "gspo"},
            ["--algo.entropy_advantage.enable", "--actor.policy_loss_type gspo", "ppo"],
        ),
        (EntropyBonus(entropy_steps=0), {}, ["--actor.entropy_steps"]),
        (
            EntropyBonus(entropy_steps=5),
            {"actor.entropy_coef": None},
            ["--actor.entropy_steps", "--actor.entropy_coef"],
        ),
        (EntropyReward(coef=-0.1), {}, ["--algo.entropy_reward.coef -0.1"]),
        (EntropyReward(steps=500), {}, ["--algo.entropy_reward.steps", "--algo.entropy_reward.coef"]),
        (EntropyReward(coef=0.01, steps=0), {}, ["--algo.entropy_reward.steps 0"]),
        (
            EntropyReward(coef=0.01),
            {"algo.advantage.drop_zero_variance": True},
            ["--algo.entropy_reward.coef", "--algo.advantage.drop_zero_variance"],
        ),
        (
            EntropyReward(coef=0.01),
            {"algo.advantage.estimator": "w_reinforce"},
            ["--algo.entropy_reward.coef", "w_reinforce"],
        ),
        (EntropyBonus(entropy_steps=5), {"actor.entropy_coef": 0.0}, ["--actor.entropy_steps", "--actor.entropy_coef"]),
    ],
)
def test_senseless_settings_are_refused_by_name(own, given, named):
    (problem,) = own.problems(FLAGS | given)
    assert all(name in problem for name in named)


@pytest.mark.parametrize(
    "own",
    [
        EntropyAdvantage(alpha=0.0, kappa=0.0),
        EntropyAdvantage(enable=True),
        EntropyBonus(),
        EntropyBonus(entropy_steps=500),
        EntropyReward(coef=0.01, steps=500),
    ],
)
def test_what_is_off_or_published_is_not_refused(own):
    assert own.problems(FLAGS) == []
