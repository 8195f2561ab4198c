"""Every method and ablation through upstream's actor and its trainer, from recorded samples, beside plain GRPO."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm import ROOT

pytestmark = pytest.mark.slow

METHODS = sorted(path.stem for path in (ROOT / "configs/methods").glob("*.yaml"))
SAMPLED = ("dynamic_allocation", "uniform_allocation", "grpo")
"""Methods that act where samples are drawn, and the base itself."""

UPDATES = ["train.micro_batch_size=32", "train.max_epochs=2", "actor.adam.lr=1e-3"]
"""Four optimizer steps of two micro-batches each: the ratio leaves 1, and the clip's bounds."""

OWN = {
    "clip_cov": ["actor.clip_cov.low=0.1", "actor.clip_cov.ratio=0.05"],  # as published, no token of so few is chosen
    "dapo": ["reward.overlong_buffer_len=10"],
    "entropy_advantages": ["algo.entropy_advantage.alpha=0.4"],
}
"""What a method needs to act on answers of five tokens."""

OFF = [
    *("actor.acpo.variant=unrouted", "actor.acpo.tau_pos=0.5", "actor.sapo.tau_neg=3", "actor.clip_cov.ratio=0.5"),
    *("actor.cispo.eps_high=0.01", "actor.kl_cov.ratio=0.5", "actor.fork_tokens.fraction=0.5"),
    *("algo.modulation.alpha=0.9", "algo.modulation.gamma=10", "algo.modulation.scope=sequence"),
    *("algo.entropy_advantage.alpha=3", "algo.w_reinforce.positive=7"),
]
"""Options of all methods, of which none is switched on."""


def between(low: float, high: float, *names: str) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(names, (low, high))


ACPO = between(0, 1, "methods/acpo_aligned", "methods/acpo_uncertainty")
CLIPPED = between(0, 1, "ppo_clip_ratio")
COMPENSATED = between(1, 1.4, "methods/modulation_compensation")
STABILISED = between(0, 1, "methods/modulation_stabilised") | between(0.6, 1, "methods/modulation_stabilisation")

ACTED: dict[str, dict[str, tuple[float, float]]] = {
    **{name: ACPO for name in METHODS if name.startswith("acpo")},
    **{name: ACPO | between(0, 1, "methods/acpo_reversed") for name in ("acpo", "acpo_unrouted", "acpo_positive")},
    "cispo": between(0, 1, "methods/cispo_bounded"),
    "clip_cov": CLIPPED | between(0, 1, "methods/clip_cov_detached"),
    "clip_higher": CLIPPED,
    "compensation": COMPENSATED,
    "dapo": CLIPPED,
    "dr_grpo": between(0.99, 1.01, "groups/advantage_gap"),  # of rewards 0 and 1
    "dynamo": COMPENSATED | STABILISED,
    "entropy_advantages": between(0, 1, "methods/entropy_advantage"),
    "entropy_loss": between(0, math.log(200), "entropy_loss"),
    "entropy_reward": between(0, math.log(200), "entropy"),
    "fork_tokens": between(0.19, 0.21, "methods/fork_tokens"),
    "gpg": between(-1, 1, "methods/ppo_kl"),
    "gspo": CLIPPED,
    "gtpo": between(0, 1, "methods/gtpo_conflict"),
    "kl": between(0, 10, "kl"),
    "kl_cov": between(0, 1, "methods/kl_cov_penalised") | between(0, 100, "methods/kl_cov_penalty"),
    "modulation": COMPENSATED | STABILISED,
    "reward_budget": between(0, 1, "groups/advantage_gap"),
    "sapo": between(0, 2, "methods/sapo_gate"),
    "stabilisation": STABILISED,
    "w_reinforce": between(1.09, 1.11, "groups/advantage_gap"),
}
"""By method, metrics of what it did and the open interval that each must lie in."""


@pytest.fixture(scope="module")
def updates(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of the actor by each method, by plain GRPO, and by it with statistics and options of ours."""
    folder = tmp_path_factory.mktemp("updates")
    wanted = {}
    for method in METHODS:
        path = folder / f"{method}.yaml"
        includes = [str(ROOT / "configs" / name) for name in ("recipes/tiny_grpo.yaml", f"methods/{method}.yaml")]
        path.write_text(json.dumps({"include": includes}))
        wanted[method] = (str(path), UPDATES + OWN.get(method, []))
    grpo = str(ROOT / "configs/recipes/tiny_grpo.yaml")
    wanted["our statistics"] = (grpo, [*UPDATES, "actor.token_stats=logits", "logger.policy=true"])
    wanted["from hidden states"] = (grpo, [*UPDATES, "actor.token_stats=hidden", "logger.policy=true"])
    wanted["measured"] = (grpo, [*UPDATES, "actor.token_stats=logits", "logger.sharpness_steps=1"])
    wanted["all off"] = (grpo, UPDATES + OFF)
    recipes, output = folder / "recipes.json", folder / "output.json"
    recipes.write_text(json.dumps(wanted))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("recorded_updates.py")), str(recipes), str(output)]
    run = subprocess.run(
        command, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert run.returncode == 0, run.stdout[-4000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SAMPLED])
def test_a_method_trains_differs_from_grpo_and_shows_what_it_did(updates: dict[str, Any], method: str) -> None:
    metrics, grpo = updates[method]["metrics"], updates["grpo"]
    assert all(math.isfinite(value) for value in metrics.values())
    assert updates[method]["weights"] not in (grpo["weights"], updates["our statistics"]["weights"])
    for name, (low, high) in ACTED[method].items():
        assert low < metrics[name] < high, (name, metrics[name])


def test_no_two_methods_are_the_same(updates: dict[str, Any]) -> None:
    weights = {name: updates[name]["weights"] for name in METHODS if name not in SAMPLED}
    assert len(set(weights.values())) == len(weights), weights


def test_switched_off_options_leave_grpos_bits(updates: dict[str, Any]) -> None:
    assert updates["all off"] == updates["grpo"]
    for method in ("dynamic_allocation", "uniform_allocation"):
        assert updates[method]["weights"] == updates["grpo"]["weights"]


def test_statistics_of_ours_are_upstreams_numbers(updates: dict[str, Any]) -> None:
    for name in ("our statistics", "from hidden states"):
        metrics = updates[name]["metrics"]
        assert 0 < metrics["policy/aligned"] < 1 and 0 < metrics["policy/uncertainty"] < 1
        assert 0 < metrics["policy/entropy"] < math.log(200)
        for same in ("policy_loss", "ppo_kl", "actor_grad_norm"):
            assert metrics[same] == pytest.approx(updates["grpo"]["metrics"][same], rel=0.05, abs=1e-3), same


def test_right_answers_part_from_wrong_ones_in_an_update(updates: dict[str, Any]) -> None:
    measured = updates["measured"]
    assert measured["metrics"]["policy/effective_sharpness"] > 0.1
    assert measured["weights"] == updates["our statistics"]["weights"]
