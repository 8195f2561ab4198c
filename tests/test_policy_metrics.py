"""Metrics of the policy: what is refused of their flags, and their numbers (how they are taken: test_methods.py)."""

import math

import pytest
import torch

from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.policy_metrics import PolicyMetrics, certainty

FLAGS = {"algo.allocation.strategy": "uniform"}


def test_certainty_is_averaged_over_response_tokens():
    zeros, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    batch = MicroBatch(
        log_probs=zeros,
        old_log_probs=zeros,
        advantages=zeros,
        mask=mask,
        entropy=torch.tensor([[1.0, 3.0, 50.0]]),
        is_mode=torch.tensor([[True, False, True]]),
        mode_log_prob=torch.tensor([[math.log(0.9), math.log(0.5), math.nan]]),
    )
    found = {name: (total / count).item() for name, (total, count) in certainty(batch).items()}
    assert found == pytest.approx({"policy/entropy": 2, "policy/aligned": 0.5, "policy/uncertainty": 0.3})


@pytest.mark.parametrize(
    ("own", "flags", "named"),
    [
        (PolicyMetrics(sharpness_steps=0), {}, ["--logger.sharpness_steps 0"]),
        (
            PolicyMetrics(sharpness_steps=5),
            {"algo.allocation.strategy": None},
            ["--logger.sharpness_steps", "--algo.allocation.strategy", "uniform"],
        ),
    ],
)
def test_senseless_settings_are_refused_by_name(own, flags, named):
    (problem,) = own.problems(FLAGS | flags)
    assert all(name in problem for name in named)


@pytest.mark.parametrize("own", [PolicyMetrics(), PolicyMetrics(policy=True), PolicyMetrics(sharpness_steps=1)])
def test_sound_settings_are_not_refused(own):
    assert own.problems(FLAGS) == []
