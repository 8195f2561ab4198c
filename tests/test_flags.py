"""The fork's flags beside upstream's: registered, typed, checked, and described without upstream's help texts."""

import argparse
import json
from types import SimpleNamespace

import pytest

from openrlhf.rlvr import flags, metrics
from openrlhf.rlvr.evaluation import Evaluation


def upstream_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--eval.dataset", type=str, default=None, help="secret prose")
    parser.add_argument("--logger.tensorboard_dir", type=str, default=None)
    parser.add_argument("--logger.logging_steps", type=int, default=1)
    parser.add_argument("--actor.adam.betas", type=float, nargs=2, default=(0.9, 0.95))
    parser.add_argument("--algo.advantage.estimator", choices=["gae", "rloo"], default="gae")
    parser.add_argument("--algo.dynamic_filtering_enable", action="store_true")
    for name in ("n_samples_per_prompt", "batch_size", "vllm_generate_batch_size"):
        parser.add_argument(f"--rollout.{name}", type=int, default=None if "vllm" in name else 8)
    for name in ("reward.remote_url", "train.agent_func_path"):
        parser.add_argument(f"--{name}", default=None)
    for model in ("actor", "ref", "critic", "reward"):
        parser.add_argument(f"--{model}.num_nodes", type=int, default=1)
        parser.add_argument(f"--{model}.num_gpus_per_node", type=int, default=1)
    for name in ("ds.ring_attn_size", "ds.tensor_parallel_size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--actor.policy_loss_type", choices=["ppo", "gspo"], default="ppo")
    parser.add_argument("--actor.loss_agg_mode", choices=["token-mean", "seq-mean-token-mean"], default="token-mean")
    for name in ("actor.dual_clip", "actor.entropy_coef", "rollout.max_new_tokens"):
        parser.add_argument(f"--{name}", type=float, default=None)
    parser.add_argument("--actor.eps_clip_low_high", type=float, nargs=2, default=None)
    parser.add_argument("--algo.kl.init_coef", type=float, default=0.01)
    parser.add_argument("--train.batch_size", type=int, default=128)
    parser.add_argument("--train.dynamic_batch_enable", action="store_true")
    for name in ("data.max_len", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"):
        parser.add_argument(f"--{name}", type=int, default=None if "rollout" in name else 2048)
    parser.add_argument("--ckpt.max_mem", type=float, default=float("inf"))
    parser.add_argument("--actor.nesterov", action="store_true", default=True)
    parser.add_argument("--actor.no_nesterov", dest="actor.nesterov", action="store_false")
    return parser


def test_everything_is_off_by_default():
    args = vars(flags.parse(upstream_parser(), []))
    assert args["logger.metrics_path"] is None
    assert args["eval.at_start"] is False and args["eval.at_end"] is False
    assert "train.schema_path" not in args


def test_upstreams_choices_can_be_extended():
    assert vars(flags.parse(upstream_parser(), ["--algo.advantage.estimator", "reward_budget"]))
    with pytest.raises(SystemExit):
        flags.parse(upstream_parser(), ["--algo.advantage.estimator", "reward_budgets"])


def test_problems_of_an_allocation_stop_the_start():
    rare = ["--algo.allocation.strategy", "dynamic", "--algo.allocation.min_samples", "9"]
    with pytest.raises(SystemExit) as error:
        flags.parse(upstream_parser(), rare)
    assert "--algo.allocation.min_samples 9: must lie between 1 and --rollout.n_samples_per_prompt 8" in str(
        error.value
    )
    assert "no verdicts; give --reward.remote_url" in str(error.value)


RAGGED = ["--algo.allocation.strategy", "uniform"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--ref.num_gpus_per_node", "3"],
            "--train.batch_size 128: must be a multiple of the 3 ranks of the ref model",
        ),
        (
            ["--train.dynamic_batch_enable", "--data.max_len", "4096"],
            "--train.max_tokens_per_gpu 2048: a sample of --data.max_len 4096 tokens would not fit; give 4096 or more",
        ),
        (["--rollout.vllm_generate_batch_size", "7"], "--rollout.vllm_generate_batch_size 7: no training batch"),
        (["--algo.advantage.group_weight", "prompt"], "group_weight: does nothing with --algo.advantage.estimator gae"),
        (
            ["--algo.advantage.ddof", "0"],
            "ddof: does nothing with --algo.advantage.estimator gae; it is for group_norm",
        ),
    ],
)
def test_what_ragged_groups_cannot_do_is_told_before_the_start(words, told):
    with pytest.raises(SystemExit) as error:
        flags.parse(upstream_parser(), [*RAGGED, *words])
    assert told in str(error.value)
    if "advantage" not in words[0]:
        assert flags.parse(upstream_parser(), words), "upstream's own way is left to upstream"


def test_settings_read_upstreams_nested_arguments():
    args = SimpleNamespace(eval=SimpleNamespace(at_start=True, at_end=False, steps=5))
    assert Evaluation.of(args) == Evaluation(at_start=True, at_end=False)


def test_all_problems_are_reported_at_once():
    with pytest.raises(SystemExit) as error:
        flags.parse(upstream_parser(), ["--eval.at_start"])
    assert "set --eval.dataset" in str(error.value) and "set --logger.metrics_path" in str(error.value)
    rare = ["--eval.at_end", "--eval.dataset", "d", "--logger.metrics_path", "m", "--logger.logging_steps", "10"]
    with pytest.raises(SystemExit, match=r"set --logger\.logging_steps 1"):
        flags.parse(upstream_parser(), rare)


def test_the_schema_tells_types_and_defaults_and_no_prose(tmp_path):
    path = tmp_path / "schema.json"
    with pytest.raises(SystemExit) as stop:
        flags.parse(upstream_parser(), ["--train.schema_path", str(path)])
    assert stop.value.code == 0
    schema = json.loads(path.read_text())
    assert schema["eval.dataset"] == {"type": "str", "nargs": None, "choices": None, "default": None, "action": "store"}
    assert schema["actor.adam.betas"]["nargs"] == 2 and schema["ckpt.max_mem"]["default"] == "inf"
    assert schema["actor.no_nesterov"]["action"] == "store_false"
    assert schema["eval.at_start"]["type"] == "bool"
    assert "secret" not in path.read_text()


def test_metrics_are_whole_lines_of_strict_json(tmp_path):
    logger = metrics.MetricsLogger(str(tmp_path / "metrics.jsonl"), None)
    logger.log_eval(0, {"eval_default_pass1": 0.25})
    logger.log_train(1, {"reward": 1, "actor_grad_norm": float("nan"), "generated_samples": ["text", 0.5], "kl": None})
    logger.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["kind"], first["step"], first["metrics"]) == ("eval", 0, {"eval_default_pass1": 0.25})
    assert second["metrics"] == {"reward": 1.0, "actor_grad_norm": None, "kl": None}
    assert logger.last_step == {"eval": 0, "train": 1}


def test_a_line_that_a_killed_run_left_unfinished_spoils_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"whole": 1}\n{"hal')
    metrics.append_lines(str(path), ['{"next": 2}'])
    assert path.read_text().splitlines() == ['{"whole": 1}', '{"hal', '{"next": 2}']
    metrics.append_lines(str(path), ["a", "b"])
    assert path.read_text().endswith('{"next": 2}\na\nb\n')


def test_without_any_backend_upstreams_trainer_keeps_none():
    args = SimpleNamespace(logger=SimpleNamespace(metrics_path=None))
    assert metrics.metrics_logger(args, None) is None
