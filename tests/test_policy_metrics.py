"""Metrics of the policy: what is refused of their flags, and their numbers (how they are taken: test_methods.py)."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_experience import samples

from openrlhf.rlvr.diagnostics import effective_sharpness as by_arrays
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.policy_metrics import PolicyMetrics, certainty, effective_sharpness
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

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


def test_effective_sharpness_is_that_of_the_samples_whatever_their_micro_batches():
    """An actor that adds a known number to each sample's log-probabilities: right ones gain, wrong ones lose."""
    experiences = samples([3, 2, 2], [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0], 0)
    buffer = NaiveReplayBuffer(3)
    for one in experiences:
        one.action_log_probs = -torch.rand(one.action_mask.shape)
        one.index = [0]
        buffer.append(one)

    class Adds:
        training, model = True, SimpleNamespace(device=torch.device("cpu"))

        def __call__(self, sequences, mask, **_):
            return known(sequences, mask)

        def eval(self): ...
        def train(self, mode): ...

    def known(sequences, mask):
        return -(sequences[:, 1:] % 7).float()

    trainer = SimpleNamespace(replay_buffer=buffer, actor=Adds(), strategy=SimpleNamespace(ring_attn_group=None))
    width = max(one.action_mask.shape[1] for one in experiences)
    old, new, mask = (
        torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
        for rows in zip(
            *((one.action_log_probs, known(one.sequences, None), one.action_mask) for one in experiences), strict=True
        )
    )
    correct, draws = [0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2]
    groups = by_arrays(old, new, mask, correct, draws)
    found = effective_sharpness(trainer, None)["policy/effective_sharpness"]
    assert found == pytest.approx(groups[:2].mean(), rel=1e-5) and math.isnan(groups[2])
