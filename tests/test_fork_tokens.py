"""80/20: how many tokens learn, which, and that the others have no gradient under any loss."""

import pytest
import torch
from softmax_reference import ragged

from openrlhf.rlvr.acpo import Acpo, acpo
from openrlhf.rlvr.fork_tokens import ForkTokens, fork_threshold, is_fork, only_forks_learn
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.ppo import Clip, gspo, ppo


def of_entropies(*rows):
    entropy = torch.tensor(rows)
    zeros = torch.zeros_like(entropy)
    samples = torch.arange(len(rows)) * 7
    return MicroBatch(zeros, zeros, zeros, entropy >= 0, entropy=entropy, samples=samples)


@pytest.mark.parametrize(("tokens", "forks"), [(1, 1), (4, 1), (5, 1), (6, 2), (10, 2), (11, 3), (15, 3), (1000, 200)])
def test_a_fifth_of_the_tokens_rounded_up(tokens, forks):
    batch = of_entropies([float(one * 7919 % tokens) for one in range(tokens)])
    chosen = is_fork(batch, fork_threshold([batch], 0.2))
    assert chosen.sum() == forks
    assert batch.entropy[chosen].min() > batch.entropy[~chosen].max() if forks < tokens else True


def test_seven_hundredths_of_a_hundred_tokens_are_seven():
    """.07·100 is 7.000000000000001 in floating point."""
    batch = of_entropies([float(one) for one in range(100)])
    assert is_fork(batch, fork_threshold([batch], 0.07)).sum() == 7


def test_the_greatest_entropies_of_the_whole_step():
    """Not of each micro-batch; −1 marks a place without a token."""
    first, second = of_entropies([9.0, 8.0, 7.0, 1.0, 2.0]), of_entropies([3.0, -1.0, 4.0, 5.0, -1.0])
    second = MicroBatch(**{**vars(second), "samples": torch.tensor([1])})
    threshold = fork_threshold([first, second], 0.25)
    assert is_fork(first, threshold)[0].tolist() == [True, True, False, False, False]
    assert not is_fork(second, threshold).any()


@pytest.mark.parametrize(("samples", "expected"), [([0, 7], [[1, 1, 0], [0, 0, 0]]), ([7, 0], [[0, 0, 0], [1, 1, 0]])])
def test_of_equal_entropies_the_earlier_sample_and_token_is_chosen(samples, expected):
    batch = of_entropies([1.0, 1.0, 0.0], [1.0, 1.0, 1.0])
    batch = MicroBatch(**{**vars(batch), "samples": torch.tensor(samples)})
    assert is_fork(batch, fork_threshold([batch], 2 / 6)).int().tolist() == expected


@pytest.mark.parametrize(
    ("function", "settings"),
    [(ppo, Clip()), (gspo, Clip()), (acpo, Acpo()), (acpo, Acpo(variant="unrouted"))],
)
def test_only_forks_have_a_gradient(function, settings):
    case = ragged(9, samples=6, places=9, spread=0.05)
    logits = case.logits.clone().requires_grad_()
    batch = case.batch(logits)
    forks = is_fork(batch, fork_threshold([batch.detached()], 0.3))
    restricted = function(only_forks_learn(batch, forks), settings)
    (gradient,) = torch.autograd.grad(restricted.loss.sum(), logits, retain_graph=True)
    whole = function(batch, settings)
    (all_gradients,) = torch.autograd.grad(whole.loss.sum(), logits)
    assert (gradient[~forks] == 0).all() and torch.equal(gradient[forks], all_gradients[forks])
    assert torch.equal(restricted.loss, whole.loss)


def test_a_step_without_tokens_has_no_forks():
    batch = of_entropies([-1.0, -1.0])
    assert fork_threshold([batch], 0.2) is None and not is_fork(batch, None).any()


@pytest.mark.parametrize(
    ("options", "given", "named"),
    [
        ({"fraction": 0.0}, {}, ["--actor.fork_tokens.fraction", "--actor.fork_tokens.enable"]),
        ({"fraction": 1.0}, {}, ["--actor.fork_tokens.fraction", "--actor.fork_tokens.enable"]),
        (
            {"normaliser": "selected"},
            {"actor.loss_agg_mode": "seq-mean-token-sum-norm"},
            ["--actor.fork_tokens.normaliser", "--actor.loss_agg_mode"],
        ),
        (
            {"normaliser": "selected"},
            {"actor.policy_loss_type": "acpo", "actor.acpo.loss_agg_mode": "seq-mean-token-sum-norm"},
            ["--actor.fork_tokens.normaliser", "--actor.acpo.loss_agg_mode"],
        ),
    ],
)
def test_senseless_settings_are_refused_by_name(options, given, named):
    flags = {"actor.policy_loss_type": "ppo", "actor.loss_agg_mode": "token-mean", **given}
    (problem,) = ForkTokens(enable=True, **options).problems(flags)
    assert all(name in problem for name in named)
    assert ForkTokens(**options).problems(flags) == []
    assert ForkTokens(enable=True).problems(flags) == []
