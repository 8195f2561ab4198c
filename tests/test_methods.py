"""The methods in the real trainer: several micro-batches to an optimizer step, packed or not, on one or two ranks."""

import math
from pathlib import Path

import pytest
import trainer

pytestmark = pytest.mark.slow

# Two updates a step, of four micro-batches each: at r = 1 many methods are the same.
SHORT = {
    "train__batch_size": 16,
    "train__micro_batch_size": 4,
    "actor__adam__lr": 2e-4,
    "data__max_samples": 24,
    "reward__remote_url": Path(__file__).with_name("reward_coin.py"),
    **trainer.MEASURE_SYNC,
}


def assert_sound(run, names):
    """All numbers are finite, and each of these metrics shows that its method acted on some tokens and not on all."""
    assert list(run.steps) == [1, 2, 3]
    for metrics in run.steps.values():
        assert all(math.isfinite(value) for value in metrics.values())
        assert abs(metrics["vllm_kl"]) < 0.02
    for name in names:
        values = [metrics[f"methods/{name}"] for metrics in run.steps.values()]
        assert all(0 <= value <= 1 for value in values) and any(0 < value < 1 for value in values), (name, values)


def test_acpo_modulated_over_the_step_at_fork_tokens(task, tmp_path):
    run = trainer.train(
        tmp_path,
        task,
        actor__policy_loss_type="acpo",
        algo__modulation__enable=True,
        actor__fork_tokens__enable=True,
        **SHORT,
    )
    assert_sound(run, ["acpo_aligned", "acpo_uncertainty", "fork_tokens", "modulation_stabilised"])
    for metrics in run.steps.values():
        assert metrics["methods/fork_tokens"] == pytest.approx(0.2, abs=0.02)
        assert 1 < metrics["methods/modulation_compensation"] < 1.4  # every step has a right sample


def two_ranks(folder, task, form):
    """GTPO, Clip-Cov, entropies wherever they go and dynamic allocation, in packed micro-batches, under ZeRO-3."""
    return trainer.train(
        folder,
        task,
        actor__policy_loss_type="clip_cov",
        actor__clip_cov__low=0.1,
        actor__clip_cov__ratio=0.1,
        actor__entropy_coef=0.01,
        actor__token_stats=form,
        algo__gtpo__enable=True,
        algo__entropy_advantage__enable=True,
        algo__entropy_reward__coef=0.01,
        algo__advantage__estimator="reward_budget",
        algo__allocation__strategy="dynamic",
        logger__policy=True,
        logger__sharpness_steps=2,
        ds__zero_stage=3,
        actor__num_gpus_per_node=2,
        train__dynamic_batch_enable=True,
        train__max_tokens_per_gpu=128,
        rollout__max_tokens_per_gpu=128,
        **SHORT,
    )


def test_two_ranks_under_zero3_learn_the_same_from_logits_and_inside_the_output_layer(task, tmp_path):
    runs = [two_ranks(tmp_path / form, task, form) for form in ("logits", "hidden")]
    for run in runs:
        assert_sound(run, ["clip_cov_detached", "gtpo_conflict"])
        for step, metrics in run.steps.items():
            assert metrics["methods/entropy_advantage"] > 0
            assert 0 < metrics["policy/entropy"] == pytest.approx(metrics["entropy"], abs=0.1)
            assert 0 < metrics["policy/aligned"] < 1 and 0 < metrics["policy/uncertainty"] < 1
            assert ("policy/effective_sharpness" in metrics) == (step == 2)
    first, second = (run.steps[1] for run in runs)
    assert first.keys() == second.keys()
    for name, value in first.items():  # the samples of the first step are the same
        assert second[name] == pytest.approx(value, rel=0.02, abs=2e-3), name
