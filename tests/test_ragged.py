"""Ragged sampling by real runs: labels, budgets, order and statistics hold in each configuration and over a resume."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import trainer

from openrlhf.rlvr.audit import audit, read_calls, read_steps

pytestmark = pytest.mark.slow

PROMPTS, BATCH, AVERAGE, LOW, HIGH = 42, 8, 4, 2, 7
STOP, EPISODES = 5, 2

RAGGED = {
    "algo__allocation__strategy": "dynamic",
    "algo__allocation__min_samples": LOW,
    "algo__allocation__max_samples": HIGH,
    "algo__allocation__min_history": 2,
    "algo__advantage__estimator": "reward_budget",
    "reward__remote_url": Path(__file__).with_name("reward_secret.py"),
    "rollout__batch_size": BATCH,
    "rollout__n_samples_per_prompt": AVERAGE,
    "train__batch_size": BATCH * AVERAGE // 2,  # two updates a step
    "train__micro_batch_size": 4,
    "train__num_episodes": EPISODES,
    "actor__adam__lr": 1e-4,  # responses stay diverse
    "data__max_samples": PROMPTS,
    "data__max_len": 256,
    "data__id_key": "name",
    "vllm__enable_prefix_caching": True,
    "ckpt__save_steps": STOP,
    **trainer.MEASURE_SYNC,
}

SYNCHRONOUS = {
    "actor__num_gpus_per_node": 2,
    "vllm__num_engines": 2,
    "ds__zero_stage": 3,
    "train__dynamic_batch_enable": True,
    "train__max_tokens_per_gpu": 600,
    "rollout__max_tokens_per_gpu": 600,
    "algo__dynamic_filtering_enable": True,
    "algo__dynamic_filtering_range": (0.0, 1.0),
    **RAGGED,
    "train__num_episodes": 4,
}

ASYNCHRONOUS = {
    "actor__num_gpus_per_node": 2,
    "train__async_enable": True,
    "train__partial_rollout_enable": True,
    "rollout__vllm_generate_batch_size": 12,
    "algo__advantage__group_weight": "prompt",
    "algo__advantage__drop_zero_variance": True,
    **RAGGED,
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts longer than a block of the engine's cache, each with a secret that its label knows too."""
    path = tmp_path_factory.mktemp("secrets") / "prompts.jsonl"
    with path.open("w") as file:
        for number in range(PROMPTS):
            modulus = (1, 2, 2, 3, 4, 1000)[number % 6]
            secret = f"s{number:03}{'abcdef'[number % 6]}"
            row = {"input": f"{'x' * 150} {secret}: 1+1=?", "label": f"{secret} {modulus}", "name": f"prompt {number}"}
            file.write(json.dumps({**row, "datasource": f"one in {modulus}"}) + "\n")
    return path


def train(folder, task, prompts, **flags):
    records = {"logger__groups_path": folder / "groups", "logger__metrics_path": folder / "metrics.jsonl"}
    return trainer.train(folder, task, data__prompt_dataset=prompts, **records, **flags)


def resumed(run, folder, task, prompts, **flags):
    shutil.copytree(run.folder / "groups", folder / "groups")
    trainer.copy_checkpoint(run, STOP, folder)
    return train(folder, task, prompts, ckpt__load_enable=True, **flags)


@pytest.fixture(scope="module")
def synchronous(task, prompts, tmp_path_factory):
    """Two ranks under ZeRO-3, two engines, micro-batches by tokens, prompts filtered, prefixes cached."""
    return train(tmp_path_factory.mktemp("synchronous"), task, prompts, **SYNCHRONOUS)


@pytest.fixture(scope="module")
def asynchronous(task, prompts, tmp_path_factory):
    """Generation beside training with rollouts that span updates, more prompts generated than a step takes."""
    return train(tmp_path_factory.mktemp("asynchronous"), task, prompts, **ASYNCHRONOUS)


def assert_sound(run):
    assert audit(run.folder / "groups") == []
    steps = run.steps
    assert list(steps) == list(range(1, len(steps) + 1)) and len(steps) > STOP
    for metrics in steps.values():
        assert metrics["mismatch"] == 0
        assert metrics["rollout/num_samples"] <= BATCH * AVERAGE
    # Whole batches spend the budget exactly; only the last of an episode may be smaller.
    whole = [one for one in steps.values() if one["rollout/num_samples"] == BATCH * AVERAGE]
    assert len(whole) >= len(steps) // 2
    assert any(one["groups/count_std"] > 0 for one in whole)


def drawn(run):
    return [row for _, draws in read_calls(run.folder / "groups" / "draws.jsonl") for row in draws]


def learnt(run):
    return [group for step in read_steps(run.folder / "groups" / "updates.jsonl") for group in step["groups"]]


def test_synchronous_ragged_training_is_sound(synchronous):
    assert_sound(synchronous)
    assert all(abs(metrics["vllm_kl"]) < 0.02 for metrics in synchronous.steps.values()), "no prefix of old weights"


def test_asynchronous_ragged_training_is_sound(asynchronous):
    assert_sound(asynchronous)
    given = sum(group["count"] for group in learnt(asynchronous))
    assert given == EPISODES * PROMPTS * AVERAGE, "no sample is dropped, no budget missed"


def test_samples_are_learnt_in_the_order_of_their_draws(synchronous, asynchronous):
    for run in (synchronous, asynchronous):
        for step in read_steps(run.folder / "groups" / "updates.jsonl"):
            draws = [group["draw"] for group in step["groups"]]
            assert draws == sorted(draws)


def test_filtered_prompts_count_in_the_statistics_and_bequeath_their_number_of_samples(synchronous):
    rows = drawn(synchronous)
    rejected = {row["draw"]: row for row in rows if not row["accepted"]}
    heirs = [row for row in rows if row["replaces"] is not None]
    assert heirs and all(row["count"] == rejected[row["replaces"]]["count"] for row in heirs)
    later = [row for row in rows if row["prompt_id"] in {one["prompt_id"] for one in rejected.values()}]
    assert any(row["seen"] > 0 for row in later)


def test_prompts_that_are_always_right_get_the_fewest_samples(asynchronous):
    given = defaultdict(list)
    for row in drawn(asynchronous):
        if row["weight"] is not None:
            given[row["source"]].append(row["count"])
    always, sometimes = (sum(given[name]) / len(given[name]) for name in ("one in 1", "one in 2"))
    assert always < AVERAGE < sometimes


def test_a_resumed_run_gives_the_same_samples_and_ends_with_the_same_weights(synchronous, task, prompts, tmp_path):
    """Stopped on two engines, resumed on one; statistics, leftovers, draws and position come from the checkpoint."""
    run = resumed(synchronous, tmp_path, task, prompts, **{**SYNCHRONOUS, "vllm__num_engines": 1})
    assert audit(run.folder / "groups") == []
    assert [(row["draw"], row["count"], row["scores"]) for row in drawn(run)] == [
        (row["draw"], row["count"], row["scores"]) for row in drawn(synchronous)
    ]
    whole = synchronous.steps
    assert run.steps == {step: whole[step] for step in whole if step > STOP}
    assert run.weights == synchronous.weights


def test_an_asynchronous_run_resumes_with_filtering_and_batches_by_tokens_and_loses_no_sample(
    asynchronous, task, prompts, tmp_path
):
    """The second attempt has two engines, filters prompts, and packs micro-batches; what waited is not lost."""
    flags = {name: SYNCHRONOUS[name] for name in SYNCHRONOUS if "dynamic" in name or "max_tokens" in name}
    run = resumed(asynchronous, tmp_path, task, prompts, **{**ASYNCHRONOUS, **flags, "vllm__num_engines": 2})
    assert audit(run.folder / "groups") == []
    assert {row["draw"] for row in drawn(run) if row["accepted"]} == {group["draw"] for group in learnt(run)}
    assert not all(row["accepted"] for row in drawn(run))
    assert all(metrics["mismatch"] == 0 for metrics in run.steps.values())
