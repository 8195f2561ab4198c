"""Proofs by real runs: a seeded run repeats, a resumed run equals the uninterrupted one, and upstream is unharmed."""

import pytest
import trainer

from patches import build as builder
from patches.queue import REPO, load_series
from patches.release import find_wheel

pytestmark = pytest.mark.slow

STEPS, STOP = 8, 4

# All that the plain run leaves out, at once: colocation, ranks, ZeRO-3, reference model, schedule, caching, evaluation,
# and packed micro-batches whose sizes follow from the lengths of the samples.
EVERYTHING = {
    "train__colocate_all": True,
    "actor__num_gpus_per_node": 2,
    "ref__num_gpus_per_node": 2,
    "vllm__num_engines": 2,
    "ds__zero_stage": 3,
    "algo__kl__init_coef": 0.01,
    "algo__kl__use_loss": True,
    "algo__kl__estimator": "k3",
    "actor__lr_scheduler": "cosine_with_min_lr",
    "vllm__enable_prefix_caching": True,
    "train__dynamic_batch_enable": True,
    "train__max_tokens_per_gpu": 128,
    "rollout__max_tokens_per_gpu": 128,
    "eval__steps": 3,
    "eval__temperature": 1.0,
    "eval__n_samples_per_prompt": 1,
    **trainer.MEASURE_SYNC,
}


def resumed(run, folder, task, **flags):
    trainer.copy_checkpoint(run, STOP, folder)
    return trainer.train(folder, task, ckpt__save_steps=STOP, ckpt__load_enable=True, **flags)


def assert_equal(run, other, first=1):
    """Every metric of every step, the saved weights, and the optimizer's master weights and moments."""
    steps = {step: metrics for step, metrics in other.steps.items() if step >= first}
    assert list(steps) == list(range(first, STEPS + 1))
    assert {step: metrics for step, metrics in run.steps.items() if step >= first} == steps
    assert run.weights == other.weights
    assert run.optimizer(STEPS) == other.optimizer(STEPS)


@pytest.fixture(scope="module")
def fork(task, tmp_path_factory):
    """The fork with none of its flags, on two engines."""
    folder = tmp_path_factory.mktemp("fork")
    return trainer.train(folder, task, vllm__num_engines=2, ckpt__save_steps=STOP)


@pytest.fixture(scope="module")
def everything(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything")
    return trainer.train(folder, task, ckpt__save_steps=STOP, eval__dataset=task / "validation.jsonl", **EVERYTHING)


def test_the_fork_with_no_flag_of_its_own_is_the_reference_bit_for_bit(fork, task, tmp_path):
    """The reference is built without our features and holds no module of them; it has one engine, the fork two."""
    series = load_series()
    output = REPO / "build" / "reference"
    reference = builder.build(series.without(["features"]), find_wheel(series.upstream, None), output, "reference")
    assert not (reference.tree / "openrlhf" / "rlvr").exists()
    run = trainer.train(tmp_path, task, ckpt__save_steps=STOP, package=reference.tree)
    assert len({step["reward"] for step in run.steps.values()}) > STEPS // 2, "the runs must do something"
    assert_equal(fork, run)


def test_equal_groups_through_our_modules_have_upstreams_numbers_bit_for_bit(fork, task, tmp_path):
    """Identities, statistics, batches and advantages of ours: with all counts equal, nothing of upstream's changes."""
    run = trainer.train(tmp_path, task, ckpt__save_steps=STOP, algo__allocation__strategy="uniform")
    assert all(step["groups/count_std"] == 0 for step in run.steps.values())
    steps = {step: {k: v for k, v in metrics.items() if "groups/" not in k} for step, metrics in run.steps.items()}
    assert steps == fork.steps
    assert (run.weights, run.optimizer(STEPS)) == (fork.weights, fork.optimizer(STEPS))


def test_a_resumed_run_equals_the_uninterrupted_one(fork, task, tmp_path):
    """Stopped on two engines, resumed on one."""
    assert_equal(resumed(fork, tmp_path, task), fork, first=STOP + 1)


def test_it_holds_with_all_the_rest(everything, task, tmp_path):
    flags = {**EVERYTHING, "eval__dataset": task / "validation.jsonl"}
    assert_equal(resumed(everything, tmp_path, task, **flags), everything, first=STOP + 1)


def test_t10_the_engines_have_the_actors_weights_throughout(everything):
    """Colocated engines under ZeRO-3, prefix caching on: a stale cache or weight would show as a growing difference."""
    assert all(abs(metrics["vllm_kl"]) < 0.01 for metrics in everything.steps.values())
