"""Correcting for the engine's log-probabilities: upstream's numbers for every setting that it allows."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from softmax_reference import ragged

from openrlhf.models import PolicyLoss
from openrlhf.rlvr.aggregation import aggregate
from openrlhf.rlvr.importance import Correction, importance_factor
from openrlhf.rlvr.ppo import Clip, ppo

SETTINGS = [
    Correction("token", "mask", "ratio", (0.7, 1.4)),
    Correction("token", "clip", "ratio", (0.7, 1.4)),
    Correction("seq", "mask", "ratio", (0.9, 1.1)),
    Correction("token", "mask", "binary_kl", (0.0, 0.01)),
    Correction("seq", "mask", "binary_kl", (0.0, 0.02)),
    Correction("token", "mask", "tv", (0.0, 0.05)),
    Correction("seq", "mask", "tv", (0.0, 0.06)),
]


def batch_of(seed):
    batch = ragged(seed, samples=8, places=9, dtype=torch.float32).batch().detached()
    noise = 0.4 * torch.randn(batch.log_probs.shape, generator=torch.Generator().manual_seed(seed))
    rollout = (batch.old_log_probs + noise).clamp(max=-1e-3)
    # Every row has a token: a row without one is a sequence to upstream's share of filtered ones, and none to ours.
    mask = batch.mask | (torch.arange(9) == 4)
    case = ragged(seed, samples=8, places=9, dtype=torch.float32)
    return replace(case.batch().detached(), mask=mask), rollout


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: f"{one.level} {one.mode} {one.gating}")
def test_the_same_as_upstreams(settings):
    for seed in range(3):
        case, rollout = batch_of(seed)
        theirs, ours = (case.log_probs.clone().requires_grad_() for _ in range(2))
        mask = case.mask.float()
        loss_of = PolicyLoss(
            is_correction_level=settings.level,
            is_correction_mode=settings.mode,
            is_correction_gating=settings.gating,
            is_correction_threshold=list(settings.threshold),
        )
        loss, _, _, kl, filtered = loss_of(theirs, case.old_log_probs, case.advantages, mask, rollout)
        loss.backward()
        batch = replace(case, log_probs=ours, rollout_log_probs=rollout)
        factor, metrics = importance_factor(batch, settings)
        totals = {"batch_num_tokens": mask.sum(), "global_batch_size": 8}
        aggregate(ppo(batch, Clip()).loss * factor, batch.mask, **totals).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)
        found = {name: (total / count).item() for name, (total, count) in metrics.items()}
        assert found == {
            "vllm_kl": pytest.approx(kl.item(), abs=1e-6),
            "is_filter_ratio": pytest.approx(filtered.item()),
        }
        assert (factor[~case.mask] == 1).all()
        if seed == 0:
            assert 0 < filtered < 1


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: f"{one.level} {one.mode} {one.gating}")
def test_what_stands_behind_the_mask_is_not_judged(settings):
    case, rollout = batch_of(1)
    factor, metrics = importance_factor(replace(case, rollout_log_probs=rollout), settings)
    spoilt = torch.where(case.mask, rollout, math.nan)
    again, same = importance_factor(replace(case, rollout_log_probs=spoilt), settings)
    assert torch.equal(factor, again) and metrics == same
    empty = replace(case, rollout_log_probs=rollout, mask=torch.zeros_like(case.mask))
    factor, metrics = importance_factor(empty, settings)
    assert (factor == 1).all() and all(total == 0 and count == 0 for total, count in metrics.values())


def test_a_huge_difference_is_no_infinity():
    case, rollout = batch_of(2)
    apart = replace(case, rollout_log_probs=rollout - 1000)
    for settings in (Correction("token", "mask", "ratio", (0.0, math.inf)), *SETTINGS):
        assert torch.isfinite(importance_factor(apart, settings)[0]).all()


def test_the_settings_come_from_upstreams_flags():
    given = SimpleNamespace(
        is_correction_level="seq", is_correction_mode="mask", is_correction_gating="tv", is_correction_threshold=[0.05]
    )
    args = SimpleNamespace(algo=SimpleNamespace(advantage=given))
    assert Correction.of(args) == Correction("seq", "mask", "tv", (0.0, 0.05))
    given.is_correction_threshold = [0.5, 5.0]
    assert Correction.of(args).threshold == (0.5, 5.0)
