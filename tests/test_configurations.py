"""The configurations of upstream that the fork runs on CPU, each with true weight sync, on the real components."""

import math

import pytest
import trainer

pytestmark = pytest.mark.slow

SHORT = {
    "data__max_samples": 24,
    # Makes the trainer measure how far the engine's log-probabilities are from the actor's.
    "algo__advantage__is_correction_level": "token",
    "algo__advantage__is_correction_mode": "clip",
    "eval__temperature": 1.0,
    "eval__n_samples_per_prompt": 1,
}

COLOCATED = {
    "train__colocate_all": True,
    "actor__num_gpus_per_node": 2,
    "ref__num_gpus_per_node": 2,
    "vllm__num_engines": 2,
    "ds__zero_stage": 3,
    "algo__kl__init_coef": 0.01,
    "algo__kl__use_loss": True,
    "algo__kl__estimator": "k3",
    "train__enable_ema": True,
    "eval__steps": 2,
}
ASYNCHRONOUS = {
    "train__async_enable": True,
    "train__partial_rollout_enable": True,
    "ds__zero_stage": 0,
    "eval__at_start": True,
    "eval__at_end": True,
}
CRITIC = {
    "algo__advantage__estimator": "gae",
    "ds__packing_samples": True,
    "train__dynamic_batch_enable": True,
    "train__max_tokens_per_gpu": 256,
    "rollout__max_tokens_per_gpu": 256,
    "critic__adam__lr": 1e-3,
}
TENSOR_PARALLEL = {"vllm__tensor_parallel_size": 2, "ds__zero_stage": 3}


def run(folder, task, flags):
    evaluated = any(name.startswith("eval__") for name in flags)
    return trainer.train(
        folder,
        task,
        **SHORT,
        eval__dataset=task / "validation.jsonl" if evaluated else None,
        logger__metrics_path=folder / "metrics.jsonl",
        **flags,
    )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(COLOCATED, id="colocated-zero3-two-ranks-two-engines-reference-ema"),
        pytest.param(ASYNCHRONOUS, id="asynchronous-partial-rollout-zero0"),
        pytest.param(CRITIC, id="critic-packing-dynamic-batches"),
        pytest.param(TENSOR_PARALLEL, id="tensor-parallel-zero3"),
    ],
)
def test_it_runs_and_the_engine_has_the_actors_weights(flags, task, tmp_path):
    result = run(tmp_path, task, flags)
    assert list(result.steps) == [1, 2, 3]
    for metrics in result.steps.values():
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["actor_grad_norm"] > 0
    if not flags.get("train__async_enable"):
        assert all(abs(metrics["vllm_kl"]) < 0.01 for metrics in result.steps.values())
    assert result.weights
    if "eval__steps" in flags:
        assert list(result.evaluations()) == [2]
    if "eval__at_start" in flags:
        assert list(result.evaluations()) == [0, 3]
        rows = len((task / "validation.jsonl").read_text().splitlines())
        assert result.evaluations()[3]["eval_num_samples"] == min(rows, SHORT["data__max_samples"])
