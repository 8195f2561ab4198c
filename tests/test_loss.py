"""Upstream's policy loss where it meets masked tokens, huge ratios and uneven micro-batches."""

import math

import pytest
import torch

from openrlhf.models import PolicyLoss, aggregate_loss


def loss_and_gradient(log_ratio, advantages, mask):
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    zeros, advantages, mask = (torch.tensor([row]) for row in ([0.0] * len(log_ratio), advantages, mask))
    loss, *_ = PolicyLoss()(log_probs, zeros, advantages, action_mask=mask)
    loss.backward()
    return loss.item(), log_probs.grad[0].tolist()


def test_t05_an_overflow_on_a_masked_token_reaches_neither_loss_nor_gradient():
    loss, gradient = loss_and_gradient([0.1, 900.0], [-1.0, -1.0], [1.0, 0.0])
    assert loss == pytest.approx(math.exp(0.1))
    assert gradient == pytest.approx([math.exp(0.1), 0.0])


def test_t06_a_huge_ratio_times_advantage_zero_is_zero():
    loss, gradient = loss_and_gradient([200.0], [0.0], [1.0])
    assert loss == 0 and gradient == [0]


def test_t07_the_loss_of_a_step_is_its_token_mean_whatever_the_micro_batches():
    sizes, values = (100, 900), (0.5, 0.3)
    parts = [
        aggregate_loss(torch.full((1, size), value), torch.ones(1, size), batch_num_tokens=sum(sizes))
        for size, value in zip(sizes, values, strict=True)
    ]
    assert sum(parts).item() == pytest.approx(0.32)
