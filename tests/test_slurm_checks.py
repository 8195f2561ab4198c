"""Faults between settings: each is found before anything starts, and a sound configuration passes."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.rlvr.advantages import GroupAdvantage
from openrlhf.rlvr.allocation import Allocation
from openrlhf.rlvr.ragged import batch_problems
from slurm.checks import CHECKS, NOT_ON_CPU, faults, last_step
from slurm.config import Config, Setting, read_config
from slurm.local import check_devices
from slurm.placement import accelerators
from slurm.problems import UserError
from slurm.ragged import RAGGED_CHECKS
from slurm.ranges import RANGES, SCHEDULERS, Range, values
from slurm.schema import trainer_flags

SOUND = """
actor.model_name_or_path: org/model
data.prompt_dataset: org/data
reward.remote_url: https://rewards.example/judge
algo.advantage.estimator: group_norm
algo.kl.init_coef: 0
actor.num_gpus_per_node: 2
ref.num_gpus_per_node: 2
critic.num_gpus_per_node: 2
reward.num_gpus_per_node: 2
vllm.num_engines: 2
rollout.batch_size: 16
rollout.n_samples_per_prompt: 4
rollout.micro_batch_size: 8
train.batch_size: 32
train.micro_batch_size: 4
"""


def config(tmp_path: Path, *overrides: str) -> Config:
    recipe = tmp_path / "sound.yaml"
    recipe.write_text(SOUND)
    return read_config(recipe, overrides)


def test_a_sound_configuration_has_no_faults(tmp_path: Path) -> None:
    assert faults(config(tmp_path)) == []
    assert faults(config(tmp_path, "launch.device=cpu")) == []


FAULTS = {
    "actor.model_name_or_path=null": "actor.model_name_or_path (not set): the model to train must be given",
    "data.prompt_dataset=null": "data.prompt_dataset (not set): the prompts to train on must be given",
    "vllm.num_engines=0": "vllm.num_engines (0): how many vLLM engines generate must be given",
    "reward.remote_url=null": "reward.remote_url (not set): give a reward function",
    "train.batch_size=0": "train.batch_size (0): must be 1 or more",
    "eval.steps=0": "eval.steps (0): must be 1 or more, or -1 for never",
    "ckpt.save_steps=-2": "ckpt.save_steps (-2): must be 1 or more, or -1 for never",
    "train.seed=-1": "train.seed (-1): must be 0 or more and at most 4294967295: NumPy takes no other seeds",
    "actor.adam.lr=0": "actor.adam.lr (0.0): must be above 0 and finite",
    "critic.muon.lr=.inf": "critic.muon.lr (inf): must be above 0 and finite",
    "rollout.temperature=0": "rollout.temperature (0.0): must be above 0 and finite: the trainer divides logits by it",
    "eval.temperature=-0.1": "eval.temperature (-0.1): must be 0 or more",
    "rollout.top_p=1.01": "rollout.top_p (1.01): must be above 0 and at most 1",
    "vllm.gpu_memory_utilization=0": "must be above 0 and at most 1",
    "ds.zero_stage=4": "ds.zero_stage (4): must be 0 or more and at most 3",
    "logger.logging_steps=0": "logger.logging_steps (0): must be 1 or more",
    "actor.lr_scheduler=cosin": "actor.lr_scheduler (cosin): must be one of linear, cosine, ",
    "ref.num_gpus_per_node=0 algo.kl.init_coef=0.1": "must be 1 or more: this run has a ref model",
    "ds.ring_attn_size=4": "actor.num_gpus_per_node (2): 2 actor ranks do not divide into groups",
    "train.batch_size=24": "train.batch_size (24): does not divide the 64 samples of a step",
    "train.micro_batch_size=32": "train.batch_size (32): is not a multiple of 64 (train.micro_batch_size 32 x 2 actor",
    "rollout.micro_batch_size=20": "rollout.micro_batch_size (20): the 64 samples of a step do not spread evenly",
    "rollout.vllm_generate_batch_size=32": "more than rollout.batch_size 16 needs train.async_enable",
    "rollout.max_new_tokens=2048": "rollout.max_new_tokens (2048): leaves no room for a prompt within data",
    "rollout.n_samples_per_prompt=1": "group_norm compares the samples of a prompt: with one, every advantage is zero",
    "rollout.n_samples_per_prompt=1 algo.advantage.estimator=reward_budget": "reward_budget compares the samples of a",
    "algo.allocation.strategy=dynamic algo.allocation.min_samples=5": "algo.allocation.min_samples (5): a batch has "
    "rollout.n_samples_per_prompt 4 samples for each prompt and could not give every one 5: write 4 or less",
    "algo.allocation.strategy=dynamic algo.allocation.max_samples=3": "algo.allocation.max_samples (3): a batch has "
    "rollout.n_samples_per_prompt 4 samples for each prompt and could not spend them all with 3: write 4 or more",
    "algo.allocation.strategy=dynamic reward.remote_url=null reward.model_name_or_path=m": "algo.allocation.strategy "
    "(dynamic): needs to be told which samples are right: set reward.remote_url or train.agent_func_path",
    "algo.allocation.strategy=dynamic rollout.vllm_generate_batch_size=8": "is below rollout.batch_size 16, and",
    "algo.advantage.estimator=reward_budget rollout.vllm_generate_batch_size=8": "is below rollout.batch_size 16, and",
    "algo.allocation.strategy=dynamic algo.dynamic_filtering_enable=true algo.allocation.min_samples=1": "algo."
    "allocation.min_samples (1): dynamic filtering rejects every prompt with one sample",
    "algo.allocation.strategy=dynamic algo.dynamic_filtering_enable=true rollout.n_samples_per_prompt=3 "
    "train.batch_size=48 rollout.micro_batch_size=6 train.micro_batch_size=6": "(not set): dynamic filtering rejects",
    "algo.allocation.min_history=1": "must be 2 or more: one sample has no variance",
    "algo.allocation.strategy=dynamic train.dynamic_batch_enable=true train.max_tokens_per_gpu=2047": "train.max_"
    "tokens_per_gpu (2047): a sample of data.max_len 2048 tokens would not fit into 2047: write 2048 or more, or lower",
    "algo.advantage.estimator=reward_budget train.dynamic_batch_enable=true rollout.max_tokens_per_gpu=1023 "
    "ds.ring_attn_size=2": "rollout.max_tokens_per_gpu (1023): a sample of data.max_len 2048 tokens would not fit into "
    "1023 x ds.ring_attn_size x ds.tensor_parallel_size = 2046 tokens: write 1024 or more",
    "actor.dual_clip=1": "actor.dual_clip (1.0): must be above 1",
    "algo.dynamic_filtering_enable=true algo.dynamic_filtering_range=[1,0]": "the first number must be below",
    "algo.dynamic_filtering_enable=true reward.remote_url=null reward.model_name_or_path=m": "dynamic filtering needs",
    "algo.advantage.is_correction_threshold=[1,2,3]": "takes [HIGH] or [LOW, HIGH]",
    "algo.advantage.is_correction_level=seq algo.advantage.is_correction_mode=clip": "clip needs",
    "algo.advantage.is_correction_level=token algo.advantage.is_correction_gating=tv": "tv has an upper bound only",
    "reward.overlong_buffer_len=9 rollout.max_new_tokens=8": "is longer than rollout.max_new_tokens 8",
    "reward.overlong_buffer_len=9": "reward.overlong_buffer_len (9.0): needs rollout.max_new_tokens",
    "reward.stop_properly_penalty_coef=2": "must be at most 1",
    "eval.dataset=d reward.remote_url=null reward.model_name_or_path=m": "evaluation needs reward.remote_url",
    "eval.at_start=true": "eval.at_start (True): needs eval.dataset",
    "train.colocate_actor_ref=true algo.kl.init_coef=0.1 ref.num_gpus_per_node=1": "must equal actor.num_gpus_per",
    "train.colocate_critic_reward=true algo.advantage.estimator=gae critic.num_gpus_per_node=1": "must equal critic.",
    "train.colocate_all=true vllm.num_engines=1": "vllm.num_engines (1): with train.colocate_all the engines' devices",
    "train.partial_rollout_enable=true": "needs train.async_enable: true",
    "train.async_enable=true vllm.enable_sleep=true": "an asynchronous run cannot put its engines to sleep",
    "data.max_images_per_prompt=1 algo.advantage.estimator=gae": "prompts with images are trained without a critic",
    "data.max_images_per_prompt=1 train.dynamic_batch_enable=true": "prompts with images cannot be packed",
    "launch.device=cpu ds.deepcompile=true": "ds.deepcompile (True): is not available on CPU",
    "launch.device=cpu actor.optim=muon": "actor.optim (muon): must be adam on CPU",
    "launch.device=cpu ds.tensor_parallel_size=2": "ds.tensor_parallel_size (2): must be 1 on CPU",
    "launch.device=cpu ds.attn_implementation=flash_attention_2": "must be sdpa or eager on CPU",
    "launch.device=cpu vllm.sync_backend=nccl": "vllm.sync_backend (nccl): must be gloo on CPU",
    "algo.advantage.ddof=0 algo.advantage.estimator=dr_grpo": "does nothing with algo.advantage.estimator dr_grpo",
    "algo.allocation.exponent=0.5": "algo.allocation.exponent (0.5): does nothing without algo.allocation.strategy",
    "algo.allocation.strategy=uniform algo.kl.init_coef=0.1 ref.num_gpus_per_node=3": "of the 3 ranks of the ref model",
    "logger.wandb.key=environment": "export WANDB_API_KEY, or leave this out",
}


@pytest.mark.parametrize(("overrides", "message"), FAULTS.items())
def test_a_fault_between_settings_is_told_with_its_key_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: str, message: str
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    told = faults(config(tmp_path, *overrides.split()))
    assert any(message in str(problem) for problem in told)
    assert all(problem.where for problem in told)


@pytest.mark.parametrize(
    "overrides",
    [
        "algo.allocation.strategy=dynamic",
        "algo.allocation.strategy=dynamic algo.allocation.min_samples=4 algo.allocation.max_samples=4",
        "algo.allocation.strategy=dynamic algo.allocation.min_samples=1 algo.allocation.max_samples=64",
        "algo.allocation.strategy=dynamic rollout.vllm_generate_batch_size=16",
        "algo.allocation.strategy=dynamic reward.remote_url=null train.agent_func_path=agent.py",
        "algo.allocation.strategy=uniform reward.remote_url=null reward.model_name_or_path=m",
        "algo.allocation.strategy=dynamic algo.dynamic_filtering_enable=true",
        "rollout.vllm_generate_batch_size=8",
        "algo.advantage.estimator=reward_budget algo.advantage.penalties=shaped algo.advantage.drop_zero_variance=true",
        "algo.advantage.group_weight=prompt algo.advantage.ddof=0",
        "algo.allocation.strategy=dynamic train.dynamic_batch_enable=true train.max_tokens_per_gpu=2048",
        "algo.allocation.strategy=dynamic train.dynamic_batch_enable=true train.max_tokens_per_gpu=1024 "
        "ds.ring_attn_size=2",
        "train.dynamic_batch_enable=true train.max_tokens_per_gpu=2000",
        "algo.allocation.strategy=dynamic train.max_tokens_per_gpu=2000",
    ],
)
def test_a_budget_that_can_be_shared_out_has_no_faults(tmp_path: Path, overrides: str) -> None:
    assert faults(config(tmp_path, *overrides.split())) == []


@given(
    st.fixed_dictionaries(
        {
            "strategy": st.sampled_from([None, "uniform", "dynamic"]),
            "min_samples": st.none() | st.integers(-1, 12),
            "max_samples": st.none() | st.integers(-1, 12),
            "exponent": st.sampled_from([-1.0, 0.0, 0.5, 1.0, math.inf]),
            "min_history": st.integers(0, 5),
            "mastery": st.none() | st.sampled_from([0.0, 0.85, 1.0, 1.1]),
            "decay": st.sampled_from([0.0, 0.9, 1.0, 1.1]),
        }
    ),
    st.fixed_dictionaries(
        {
            "algo.advantage.estimator": st.sampled_from(["group_norm", "reward_budget", "gae"]),
            "algo.dynamic_filtering_enable": st.booleans(),
            "algo.advantage.ddof": st.sampled_from([0, 1]),
            "algo.advantage.group_weight": st.sampled_from(["sample", "prompt"]),
            "algo.advantage.penalties": st.sampled_from(["after", "shaped"]),
            "algo.advantage.drop_zero_variance": st.booleans(),
            "train.dynamic_batch_enable": st.booleans(),
            "train.batch_size": st.sampled_from([8, 9]),
            "ref.num_gpus_per_node": st.sampled_from([2, 3]),
            "actor.num_gpus_per_node": st.just(1),
            "critic.num_gpus_per_node": st.just(4),
            "reward.num_gpus_per_node": st.just(1),
            "data.max_len": st.sampled_from([2048, 20000]),
            "rollout.n_samples_per_prompt": st.integers(2, 9),
            "rollout.batch_size": st.integers(1, 3),
            "rollout.vllm_generate_batch_size": st.none() | st.integers(1, 3),
            "reward.remote_url": st.sampled_from([None, "judge.py"]),
            "train.agent_func_path": st.sampled_from([None, "agent.py"]),
        }
    ),
)
def test_the_launcher_refuses_the_allocations_that_the_trainer_would(
    options: dict[str, Any], others: dict[str, Any]
) -> None:
    given = others | {f"algo.allocation.{name}": value for name, value in options.items()}
    made = Config("any", {key: Setting(value, "r.yaml:1") for key, value in given.items()})
    defaults = {name: flag.default for name, flag in trainer_flags().items()}
    flags = defaults | given
    names = ("ddof", "group_weight", "drop_zero_variance", "penalties")
    compared = GroupAdvantage(**{name: flags[f"algo.advantage.{name}"] for name in names})
    refused = [*Allocation(**options).problems(flags), *compared.problems(flags), *batch_problems(flags)]
    between, alone = [problem for check in RAGGED_CHECKS for problem in check(made)], list(values(made))
    assert between or alone or not refused
    assert refused or not between


def test_faults_of_several_checks_are_told_together_with_where_each_value_was_set(tmp_path: Path) -> None:
    told = faults(config(tmp_path, "train.batch_size=24", "train.partial_rollout_enable=true"))
    assert {problem.where for problem in told} == {"command line"}
    assert {problem.key.split()[0] for problem in told} == {"train.batch_size", "train.partial_rollout_enable"}
    (problem,) = faults(
        config(tmp_path, "actor.num_gpus_per_node=3", "train.batch_size=64", "train.micro_batch_size=1")
    )[:1]
    assert str(problem).startswith("command line: train.batch_size (64): is not a multiple of 3")
    (problem,) = faults(config(tmp_path, "vllm.num_engines=1", "train.colocate_all=true", "actor.num_gpus_per_node=2"))
    assert problem.where == "command line"
    (problem,) = faults(config(tmp_path, "rollout.n_samples_per_prompt=3", "train.micro_batch_size=8"))[:1]
    assert problem.where == f"{tmp_path}/sound.yaml:15"


@pytest.mark.parametrize("each", RANGES, ids=lambda each: each.key)
def test_every_range_ends_where_it_says(tmp_path: Path, each: Range) -> None:
    number = float if trainer_flags()[each.key].type == "float" else int
    inside, outside = {each.low + each.above}, {each.low - 1 - each.never, *([each.low] if each.above else [])}
    if each.never:
        inside, outside = {*inside, -1}, {*outside, 0, -2}
    if each.high < math.inf:
        inside, outside = {*inside, number(each.high)}, {*outside, number(each.high) + 1}
    for value in inside:
        assert list(values(config(tmp_path, f"{each.key}={value}"))) == []
    for value in outside - inside:
        (problem,) = values(config(tmp_path, f"{each.key}={value}"))
        assert problem.key == f"{each.key} ({number(value)})"


def test_the_schedulers_are_those_that_transformers_knows() -> None:
    from transformers.trainer_utils import SchedulerType

    assert set(SCHEDULERS) == {kind.value for kind in SchedulerType}


@pytest.mark.parametrize(
    ("rows", "overrides", "told"),
    [
        (32, "", None),
        (24, "", None),
        (
            20,
            "",
            "20 prompts in steps of 16 leave 4 for the last step of an episode, and their 16 samples are not a "
            "multiple of train.batch_size 32: write data.max_samples: 16",
        ),
        (8, "", None),
        (7, "", "their 28 samples are not a multiple of train.batch_size 32: lower rollout.batch_size to 7 or less"),
        (
            24,
            "rollout.micro_batch_size=32",
            "not a multiple of rollout.micro_batch_size x 2 actor ranks = 64: write data.max_samples: 16",
        ),
        (24, "rollout.micro_batch_size=32 actor.num_gpus_per_node=1", None),
        (20, "rollout.vllm_generate_batch_size=8", "20 prompts in steps of 8 leave 4 for the last step"),
        (20, "train.dynamic_batch_enable=true", None),
        (20, "algo.dynamic_filtering_enable=true", None),
        (20, "algo.allocation.strategy=uniform", None),
        (20, "algo.advantage.estimator=reward_budget", None),
        (20, "algo.advantage.group_weight=prompt", None),
        (20, "algo.advantage.group_weight=sample algo.advantage.ddof=1", "20 prompts in steps of 16 leave 4"),
        (None, "", None),
    ],
)
def test_a_last_step_that_the_ranks_cannot_share_is_refused_with_the_rows_that_fit(
    tmp_path: Path, rows: int | None, overrides: str, told: str | None
) -> None:
    problems = [str(problem) for problem in last_step(config(tmp_path, *overrides.split()), rows)]
    assert [told in problem for problem in problems if told] == [True] * bool(told)
    assert len(problems) == bool(told)


SIZES = ("train.batch_size=0", "ds.ring_attn_size=")


@pytest.mark.parametrize("find", CHECKS, ids=lambda find: find.__name__)
def test_every_check_is_shown_to_find_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: object) -> None:
    assert callable(find)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    made = (config(tmp_path, *overrides.split()) for overrides in FAULTS if not overrides.startswith(SIZES))
    assert any(list(find(one)) for one in made)


def test_the_trainers_own_list_of_what_a_cpu_cannot_do_is_the_launchers() -> None:
    if importlib.util.find_spec("openrlhf.device") is None:
        pytest.fail("the fork is not installed")
    from openrlhf.device import start

    assert set(start._REFUSED) == set(NOT_ON_CPU)


@pytest.mark.parametrize(
    ("overrides", "needed"),
    {
        "": {"actor": 2, "vllm": 2},
        "vllm.tensor_parallel_size=4": {"actor": 2, "vllm": 8},
        "algo.kl.init_coef=0.1": {"actor": 2, "vllm": 2, "ref": 2},
        "algo.kl.init_coef=0.1 train.colocate_actor_ref=true": {"actor": 2, "vllm": 2, "ref": 0},
        "algo.kl.init_coef=0.1 train.colocate_all=true": {"actor": 2, "vllm": 0, "ref": 0},
        "train.colocate_all=true train.async_enable=true": {"actor": 2, "vllm": 2},
        "algo.advantage.estimator=gae": {"actor": 2, "vllm": 2, "critic": 2},
        "algo.advantage.estimator=gae train.colocate_all=true": {"actor": 2, "vllm": 0, "critic": 0},
        "reward.remote_url=null": {"actor": 2, "vllm": 2, "reward": 2},
        "reward.remote_url=null algo.advantage.estimator=gae train.colocate_critic_reward=true": {
            "actor": 2,
            "vllm": 2,
            "critic": 2,
            "reward": 0,
        },
        "train.agent_func_path=agent.py reward.remote_url=null": {"actor": 2, "vllm": 2},
    }.items(),
)
def test_each_part_takes_the_accelerators_that_the_trainer_will_place(
    tmp_path: Path, overrides: str, needed: dict[str, int]
) -> None:
    assert accelerators(config(tmp_path, *overrides.split())) == needed


def test_a_run_that_wants_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    check_devices(config(tmp_path), 4)
    check_devices(config(tmp_path, "launch.device=cpu"), 0)
    with pytest.raises(UserError, match=r"places 4 GPUs \(actor 2, vllm 2\), and 3 are visible"):
        check_devices(config(tmp_path), 3)
