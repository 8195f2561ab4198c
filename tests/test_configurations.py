"""Configurations that the proofs of repetition leave out, on the real components."""

import math

import pytest
import trainer

pytestmark = pytest.mark.slow

SHORT = {"data__max_samples": 24, "eval__temperature": 1.0, "eval__n_samples_per_prompt": 1, **trainer.MEASURE_SYNC}


def assert_three_sound_steps(run):
    assert list(run.steps) == [1, 2, 3]
    for metrics in run.steps.values():
        assert all(math.isfinite(value) for value in metrics.values())
        # Without a single right answer in a step there is nothing to learn from it.
        assert (metrics["actor_grad_norm"] > 0) == (metrics["rollout/reward_std"] > 0)
    assert run.weights


def test_critic_with_packing_and_dynamic_batches_on_a_tensor_parallel_engine_with_averaged_weights(task, tmp_path):
    run = trainer.train(
        tmp_path,
        task,
        algo__advantage__estimator="gae",
        critic__adam__lr=1e-3,
        ds__packing_samples=True,
        train__dynamic_batch_enable=True,
        train__max_tokens_per_gpu=256,
        rollout__max_tokens_per_gpu=256,
        vllm__tensor_parallel_size=2,
        train__enable_ema=True,
        **SHORT,
    )
    assert_three_sound_steps(run)
    assert all("critic_loss" in metrics for metrics in run.steps.values())
    assert all(abs(metrics["vllm_kl"]) < 0.01 for metrics in run.steps.values())


def test_asynchronous_training_on_real_data_with_partial_rollout_and_evaluations_at_start_and_end(task, tmp_path):
    """Competition mathematics: the tiny model fails at it; the run, the grading and the metrics must not."""
    shared = trainer.REPO.parent / "shared" / "data"
    if not shared.is_dir():
        pytest.skip("the data for tests is not laid beside the project here")
    run = trainer.train(
        tmp_path,
        task,
        train__async_enable=True,
        train__partial_rollout_enable=True,
        ds__zero_stage=0,
        reward__remote_url=trainer.REPO / "openrlhf" / "rlvr" / "rewards" / "math.py",
        algo__advantage__estimator="reinforce",
        data__prompt_dataset=shared / "train" / "math8k.json",
        data__input_key="prompt",
        data__label_key="answer",
        data__max_len=768,
        rollout__max_new_tokens=24,
        eval__dataset=shared / "train" / "math8k.json",
        eval__at_start=True,
        eval__at_end=True,
        logger__metrics_path=tmp_path / "metrics.jsonl",
        **SHORT,
    )
    assert_three_sound_steps(run)
    assert all(0 <= metrics["accuracy"] < 0.5 for metrics in run.steps.values())
    assert list(run.evaluations()) == [0, 3]
