"""What losses see of a micro-batch: clean where masked, at least float32, and r = 1 where nothing has changed."""

import math

import pytest
import torch

from openrlhf.rlvr.micro_batch import MicroBatch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_arithmetic_is_in_float32_at_least(dtype):
    values = torch.tensor([[-0.5, -1.0]], dtype=dtype)
    batch = MicroBatch(values, values, values, torch.ones(1, 2), entropy=values)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert batch.log_probs.dtype == batch.ratio.dtype == batch.entropy.dtype == wide
    assert (batch.ratio == 1).all()


@pytest.mark.parametrize("mask", [torch.tensor([[1, 0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[True, False]])])
@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_passes_the_mask(mask, spoilt):
    log_probs = torch.tensor([[-1.0, spoilt]], requires_grad=True)
    old = torch.tensor([[-1.5, spoilt]], requires_grad=True)
    batch = MicroBatch(log_probs, old, torch.tensor([[1.0, spoilt]]), mask, is_mode=torch.tensor([[True, True]]))
    assert batch.ratio.tolist() == [[pytest.approx(math.exp(0.5)), 1]]
    assert batch.mask.tolist() == batch.is_mode.tolist() == [[True, False]]
    batch.ratio.sum().backward()
    assert log_probs.grad.tolist() == [[pytest.approx(math.exp(0.5)), 0]] and old.grad[0, 1] == 0


def test_ratios_stop_at_e_to_the_20():
    log_probs = torch.tensor([[20.0, 21.0, -20.0, -900.0]], requires_grad=True)
    zeros = torch.zeros(1, 4)
    batch = MicroBatch(log_probs, zeros, zeros, torch.ones(1, 4))
    limit = math.exp(20)
    assert batch.ratio[0].tolist() == pytest.approx([limit, limit, 1 / limit, 1 / limit])
    assert batch.moving[0].tolist() == [True, False, True, False]
    batch.ratio.sum().backward()
    assert (log_probs.grad != 0)[0].tolist() == [True, False, True, False]


def test_means_are_over_a_samples_own_tokens():
    values = torch.tensor([[1.0, 2.0, 9.0], [5.0, 9.0, 9.0]])
    batch = MicroBatch(values, values, values, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert batch.sequence_mean(values).tolist() == [[1.5], [0]]
    assert [one.item() for one in batch.average(values)] == [3, 2]
    assert [one.item() for one in batch.average(values, values > 1)] == [2, 1]
    assert [one.item() for one in batch.share(values > 1)] == [1, 2]


def test_without_a_graph_everything_is_the_same():
    values = torch.tensor([[-1.0]], requires_grad=True)
    batch = MicroBatch(values, values, values, torch.ones(1, 1), samples=torch.tensor([4]), vocabulary=9)
    still = batch.detached()
    assert batch.log_probs.requires_grad and not still.log_probs.requires_grad
    assert still.vocabulary == 9 and torch.equal(still.keys, batch.keys)
