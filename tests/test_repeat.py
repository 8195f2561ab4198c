"""Proofs by real runs: a seeded run repeats, a resumed run equals the uninterrupted one, and upstream is unharmed."""

import pytest
import trainer

from patches import build as builder
from patches.queue import REPO, load_series
from patches.release import find_wheel

pytestmark = pytest.mark.slow

STEPS, STOP = 8, 4

# All that was not covered by the plain run, at once: ranks, reference model, schedule, caching, ragged micro-batches.
EVERYTHING = {
    "actor__num_gpus_per_node": 2,
    "ref__num_gpus_per_node": 2,
    "algo__kl__init_coef": 0.01,
    "algo__kl__use_loss": True,
    "algo__kl__estimator": "k3",
    "actor__lr_scheduler": "cosine_with_min_lr",
    "vllm__enable_prefix_caching": True,
    "train__dynamic_batch_enable": True,
    "train__max_tokens_per_gpu": 128,
    "rollout__max_tokens_per_gpu": 128,
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
    return trainer.train(tmp_path_factory.mktemp("everything"), task, ckpt__save_steps=STOP, **EVERYTHING)


def test_the_fork_with_no_flag_of_its_own_is_the_reference_bit_for_bit(fork, task, tmp_path):
    """The reference is built without our features and holds no module of them; it has one engine, the fork two."""
    series = load_series()
    output = REPO / "build" / "reference"
    reference = builder.build(series.without(["features"]), find_wheel(series.upstream, None), output, "reference")
    assert not (reference.tree / "openrlhf" / "rlvr").exists()
    run = trainer.train(tmp_path, task, ckpt__save_steps=STOP, package=reference.tree)
    assert len({step["reward"] for step in run.steps.values()}) > STEPS // 2, "the runs must do something"
    assert_equal(fork, run)


def test_a_resumed_run_equals_the_uninterrupted_one(fork, task, tmp_path):
    """Stopped on two engines, resumed on one."""
    assert_equal(resumed(fork, tmp_path, task), fork, first=STOP + 1)


def test_it_holds_with_ranks_reference_schedule_caching_and_dynamic_batches(everything, task, tmp_path):
    assert_equal(resumed(everything, tmp_path, task, **EVERYTHING), everything, first=STOP + 1)
