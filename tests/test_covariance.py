"""Clip-Cov and KL-Cov: which tokens they choose, and what becomes of them."""

import pytest
import torch
from softmax_reference import ragged

from openrlhf.rlvr.covariance import ClipCov, KlCov, clip_cov, clip_cov_tokens, covariance, kl_cov, kl_cov_tokens
from openrlhf.rlvr.micro_batch import PLACE_BITS, MicroBatch
from openrlhf.rlvr.ppo import Clip, cut_off, ppo


def test_the_covariance_by_hand():
    found = covariance(torch.tensor([-1.0, -2.0, -6.0]), torch.tensor([2.0, 1.0, 0.0]))
    assert found.tolist() == [2, 0, 3]


def one_row(log_probs, advantages, old=None):
    log_probs, advantages = torch.tensor([log_probs]), torch.tensor([advantages])
    old = log_probs if old is None else torch.tensor([old])
    return MicroBatch(log_probs, old, advantages, torch.ones_like(log_probs), samples=torch.tensor([2]))


def places(keys):
    return sorted((keys - (2 << PLACE_BITS)).tolist())


def test_kl_cov_penalises_the_tokens_of_greatest_covariance():
    batch = one_row([-1.0, -2.0, -6.0, -3.0], [2.0, 1.0, -3.0, 0.0], [-1.5, -2.0, -5.0, -3.0])
    assert covariance(batch.log_probs[0], batch.advantages[0]).tolist() == [4, 1, 9, 0]
    assert places(kl_cov_tokens([batch], KlCov(2e-4), 0)) == [2]
    keys = kl_cov_tokens([batch], KlCov(0.5), 0)
    assert places(keys) == [0, 2]
    terms = kl_cov(batch, KlCov(0.5), keys)
    assert terms.loss[0].tolist() == pytest.approx(
        [-2 * torch.tensor(0.5).exp().item() + 0.5, -1, 3 * torch.tensor(-1.0).exp().item() + 1, 0]
    )
    assert terms.coefficient[0].tolist() == pytest.approx(
        [2 * torch.tensor(0.5).exp().item() - 1, 1, -3 * torch.tensor(-1.0).exp().item() + 1, 0]
    )
    assert [one.item() for one in terms.metrics["kl_cov_penalised"]] == [2, 4]
    assert [one.item() for one in terms.metrics["kl_cov_penalty"]] == [1.5, 2]


def test_without_differences_there_is_no_covariance_to_penalise():
    batch = one_row([-1.0, -2.0, -6.0, -3.0], [1.0] * 4)
    assert len(kl_cov_tokens([batch], KlCov(0.5), 0)) == 0


def test_of_equal_covariances_the_first_token_is_taken():
    batch = one_row([-1.0, -3.0, -1.0, -3.0], [1.0, -1.0, 1.0, -1.0])
    assert places(kl_cov_tokens([batch], KlCov(0.5), 0)) == [0, 1]


def test_clip_cov_draws_from_those_within_the_bounds_that_the_clip_leaves_alone():
    batch = ragged(1, samples=40, places=25, spread=0.3).batch().detached()
    clip, bounds = Clip(0.2, 0.28), (0.2, 0.9)
    cov = torch.zeros_like(batch.log_probs)
    cov[batch.mask] = covariance(batch.log_probs[batch.mask], batch.advantages[batch.mask])
    allowed = batch.mask & (cov > bounds[0]) & (cov < bounds[1]) & ~cut_off(batch, clip)
    count = int(batch.mask.sum())
    drawn = []
    for seed in range(40):
        keys = clip_cov_tokens([batch], (ClipCov(0.02, *bounds), clip), seed)
        assert len(keys) == int(0.02 * count) and len(keys.unique()) == len(keys)
        chosen = torch.isin(batch.keys, keys) & batch.mask
        assert (chosen & ~allowed).sum() == 0
        drawn.append(chosen)
    # By chance: in 40 draws of a tenth of them most are met, and none every time.
    often = torch.stack(drawn).sum(0)[allowed].double()
    expected = 40 * int(0.02 * count) / int(allowed.sum())
    assert often.mean().item() == pytest.approx(expected) and often.max() < 40
    assert often.var().item() == pytest.approx(expected * (1 - expected / 40), rel=0.4)
    everything = clip_cov_tokens([batch], (ClipCov(1.0, *bounds), clip), 0)
    assert len(everything) == allowed.sum()
    assert len(clip_cov_tokens([batch], (ClipCov(1e-9, *bounds), clip), 0)) == 1


def test_clip_cov_is_ppo_but_for_the_tokens_detached():
    case = ragged(1, samples=10, places=9, spread=0.3, dtype=torch.float32)
    settings = ClipCov(0.1, -9.0, 9.0), Clip(0.2, 0.28)
    gradients = {}
    for name in ("ppo", "clip_cov"):
        logits = case.logits.clone().requires_grad_()
        batch = case.batch(logits)
        keys = clip_cov_tokens([batch.detached()], settings, 0)
        terms = clip_cov(batch, settings, keys) if name == "clip_cov" else ppo(batch, settings[1])
        terms.loss.sum().backward()
        gradients[name] = logits.grad
    chosen = torch.isin(batch.keys, keys) & batch.mask
    assert 0 < chosen.sum() < batch.mask.sum()
    assert [one.item() for one in terms.metrics["clip_cov_detached"]] == [chosen.sum(), batch.mask.sum()]
    assert (gradients["clip_cov"][chosen] == 0).all() and (gradients["ppo"][chosen] != 0).any()
    assert torch.equal(gradients["clip_cov"][~chosen], gradients["ppo"][~chosen])
    none = keys[:0]
    assert torch.equal(clip_cov(batch, settings, none).loss, ppo(batch, settings[1]).loss)
    unbounded = ppo(batch, Clip(float("inf"), float("inf")))
    assert torch.equal(kl_cov(batch, KlCov(), none).loss, unbounded.loss)


@pytest.mark.parametrize("select", [clip_cov_tokens, kl_cov_tokens])
def test_a_step_without_tokens_chooses_none(select):
    batch = ragged(0).batch().detached()
    empty = MicroBatch(**{**vars(batch), "mask": torch.zeros_like(batch.mask)})
    settings = KlCov() if select is kl_cov_tokens else (ClipCov(), Clip())
    assert len(select([empty], settings, 0)) == 0
