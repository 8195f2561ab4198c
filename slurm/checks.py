"""Faults that lie between settings, each found before anything is started.

The trainer would meet most of them too: after Ray, engines and models are up, or as a hang. A check is a function
from a configuration to the faults it finds; adding one is adding it to CHECKS.
"""

import os
from collections.abc import Callable, Iterator

from slurm.config import WANDB_KEY, Config
from slurm.placement import (
    data_parallel_ranks,
    engine_size,
    has_critic,
    has_reference,
    has_reward_function,
    size,
)
from slurm.problems import Problem
from slurm.ragged import RAGGED_CHECKS, is_ragged
from slurm.ranges import values

Check = Callable[[Config], Iterator[Problem]]

GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "reward_budget")


def faults(config: Config) -> list[Problem]:
    """All faults between settings."""
    for checks in (values,), (ranks,), CHECKS:  # the later ones divide by what the first two look at
        if problems := [problem for find in checks for problem in find(config)]:
            return problems
    return []


def required(config: Config) -> Iterator[Problem]:
    for key, meaning in (
        ("actor.model_name_or_path", "the model to train"),
        ("data.prompt_dataset", "the prompts to train on"),
        ("vllm.num_engines", "how many vLLM engines generate"),
    ):
        if not config[key]:
            yield config.problem(key, f"{meaning} must be given")
    if not has_reward_function(config) and not config["reward.model_name_or_path"]:
        yield config.problem(
            "reward.remote_url", "give a reward function (a .py file), or a model by reward.model_name_or_path"
        )
    used = {"ref": has_reference(config), "critic": has_critic(config), "reward": not has_reward_function(config)}
    for part in (part for part, needed in used.items() if needed):
        for key in (f"{part}.num_nodes", f"{part}.num_gpus_per_node"):
            if config[key] < 1:
                yield config.problem(key, f"must be 1 or more: this run has a {part} model")


def ranks(config: Config) -> Iterator[Problem]:
    width = config["ds.ring_attn_size"] * config["ds.tensor_parallel_size"]
    if size(config, "actor") % width:
        yield config.problem(
            "actor.num_gpus_per_node",
            f"{size(config, 'actor')} actor ranks do not divide into groups of ds.ring_attn_size x "
            f"ds.tensor_parallel_size = {width}",
        )


def batches(config: Config) -> Iterator[Problem]:
    samples = config["rollout.batch_size"] * config["rollout.n_samples_per_prompt"]
    batch, dp = config["train.batch_size"], data_parallel_ranks(config)
    if samples % batch:
        yield config.problem(
            "train.batch_size",
            f"does not divide the {samples} samples of a step (rollout.batch_size {config['rollout.batch_size']} x "
            f"rollout.n_samples_per_prompt {config['rollout.n_samples_per_prompt']}): some would be dropped",
        )
    if config["train.dynamic_batch_enable"]:
        step, words = dp, f"{dp} actor ranks"
    else:
        step = config["train.micro_batch_size"] * dp
        words = f"train.micro_batch_size {config['train.micro_batch_size']} x {dp} actor ranks"
    if batch % step:
        yield config.problem("train.batch_size", f"is not a multiple of {step} ({words})")
    micro = config["rollout.micro_batch_size"]
    if not config["train.dynamic_batch_enable"] and dp > 1 and samples % (micro * dp):
        yield config.problem(
            "rollout.micro_batch_size",
            f"the {samples} samples of a step do not spread evenly over {dp} actor ranks in pieces of {micro}",
        )
    elif samples // micro < dp:
        yield config.problem(
            "rollout.micro_batch_size", f"{samples} samples in pieces of {micro} leave some of {dp} actor ranks idle"
        )


def last_step(config: Config, rows: int | None) -> Iterator[Problem]:
    """The step that is left of an episode of `rows` prompts, for a configuration without faults of its own.

    Ranks that get fewer samples than others would wait for ever, and an update of another size would be cut off or
    run into the next step's.
    """
    if not rows or is_ragged(config) or config["train.dynamic_batch_enable"] or config["algo.dynamic_filtering_enable"]:
        return
    most = config["rollout.batch_size"]
    prompts = min(config["rollout.vllm_generate_batch_size"] or most, most)
    left, batch, dp = rows % prompts, config["train.batch_size"], data_parallel_ranks(config)
    samples = left * config["rollout.n_samples_per_prompt"]
    pieces = config["rollout.micro_batch_size"] * dp if dp > 1 else 1
    if samples % batch == 0 and samples % pieces == 0:
        return
    whole = rows - left
    way_out = f"write data.max_samples: {whole}" if whole else f"lower rollout.batch_size to {rows} or less"
    unit = f"train.batch_size {batch}" if samples % batch else f"rollout.micro_batch_size x {dp} actor ranks = {pieces}"
    yield config.problem(
        "data.max_samples",
        f"{rows} prompts in steps of {prompts} leave {left} for the last step of an episode, and their {samples} "
        f"samples are not a multiple of {unit}: {way_out}",
    )


def generation(config: Config) -> Iterator[Problem]:
    generated, batch = config["rollout.vllm_generate_batch_size"], config["rollout.batch_size"]
    if generated and generated > batch and not config["train.async_enable"]:
        yield config.problem(
            "rollout.vllm_generate_batch_size",
            f"more than rollout.batch_size {batch} needs train.async_enable: true, whose queue holds the rest",
        )
    if (config["rollout.max_new_tokens"] or 1) >= config["data.max_len"]:
        yield config.problem(
            "rollout.max_new_tokens", f"leaves no room for a prompt within data.max_len {config['data.max_len']}"
        )


def algorithm(config: Config) -> Iterator[Problem]:
    estimator, samples = config["algo.advantage.estimator"], config["rollout.n_samples_per_prompt"]
    if estimator in GROUP_ESTIMATORS and samples < 2:
        yield config.problem(
            "rollout.n_samples_per_prompt",
            f"{estimator} compares the samples of a prompt: with one, every advantage is zero",
        )
    if config["algo.dynamic_filtering_enable"]:
        low, high = config["algo.dynamic_filtering_range"]
        if low >= high:
            yield config.problem("algo.dynamic_filtering_range", "the first number must be below the second")
        if samples < 2:
            yield config.problem("rollout.n_samples_per_prompt", "dynamic filtering needs 2 or more")
        if not has_reward_function(config):
            yield config.problem("reward.remote_url", "dynamic filtering needs a reward function or an agent")
    if config["actor.dual_clip"] is not None and config["actor.dual_clip"] <= 1:
        yield config.problem("actor.dual_clip", "must be above 1")


def importance_sampling(config: Config) -> Iterator[Problem]:
    prefix = "algo.advantage.is_correction"
    level, mode, gating = (config[f"{prefix}_{part}"] for part in ("level", "mode", "gating"))
    threshold = config[f"{prefix}_threshold"]
    if len(threshold) > 2:
        yield config.problem(f"{prefix}_threshold", "takes [HIGH] or [LOW, HIGH]")
    if level == "off":
        return
    if mode == "clip" and (level != "token" or gating != "ratio"):
        yield config.problem(f"{prefix}_mode", f"clip needs {prefix}_level: token and {prefix}_gating: ratio")
    if gating != "ratio" and len(threshold) == 2 and threshold[0] > 0:
        yield config.problem(f"{prefix}_threshold", f"{gating} has an upper bound only: write [HIGH]")


def length_penalties(config: Config) -> Iterator[Problem]:
    buffer, new_tokens = config["reward.overlong_buffer_len"], config["rollout.max_new_tokens"]
    if buffer is not None and new_tokens is not None and buffer > new_tokens:
        yield config.problem("reward.overlong_buffer_len", f"is longer than rollout.max_new_tokens {new_tokens}")
    if buffer is not None and new_tokens is None:
        yield config.problem("reward.overlong_buffer_len", "needs rollout.max_new_tokens")
    coefficient = config["reward.stop_properly_penalty_coef"]
    if coefficient is not None and coefficient > 1:
        yield config.problem("reward.stop_properly_penalty_coef", "must be at most 1")


def evaluation(config: Config) -> Iterator[Problem]:
    if config["eval.dataset"] and not has_reward_function(config):
        yield config.problem("eval.dataset", "evaluation needs reward.remote_url or train.agent_func_path")
    for key in ("eval.at_start", "eval.at_end"):
        if config[key] and not config["eval.dataset"]:
            yield config.problem(key, "needs eval.dataset")


def sharing(config: Config) -> Iterator[Problem]:
    """Parts that share accelerators must be of one size."""
    together = config["train.colocate_all"]
    pairs = [("actor", "ref", (together or config["train.colocate_actor_ref"]) and has_reference(config))]
    pairs += [("critic", "reward", config["train.colocate_critic_reward"] and has_critic(config))]
    for one, other, share in pairs:
        for part in ("num_nodes", "num_gpus_per_node"):
            if share and config[f"{one}.{part}"] != config[f"{other}.{part}"]:
                yield config.problem(
                    f"{other}.{part}", f"must equal {one}.{part} {config[f'{one}.{part}']}, whose devices it shares"
                )
    if together and not config["train.async_enable"] and engine_size(config) != size(config, "actor"):
        yield config.problem(
            "vllm.num_engines",
            f"with train.colocate_all the engines' devices (x vllm.tensor_parallel_size = {engine_size(config)}) "
            f"must be the actor's {size(config, 'actor')}",
        )


def modes(config: Config) -> Iterator[Problem]:
    if config["train.partial_rollout_enable"] and not config["train.async_enable"]:
        yield config.problem("train.partial_rollout_enable", "needs train.async_enable: true")
    if config["vllm.enable_sleep"] and config["train.async_enable"]:
        yield config.problem("vllm.enable_sleep", "an asynchronous run cannot put its engines to sleep")
    if config["data.max_images_per_prompt"] > 0:
        if has_critic(config):
            yield config.problem("algo.advantage.estimator", "prompts with images are trained without a critic")
        if config["ds.packing_samples"] or config["train.dynamic_batch_enable"]:
            yield config.problem("ds.packing_samples", "prompts with images cannot be packed")


NOT_ON_CPU = (
    *("vllm.enable_sleep", "vllm.sync_with_ray", "ds.enable_sleep", "ds.load_in_4bit", "ds.use_liger_kernel"),
    *("ds.adam_offload", "ds.deepcompile"),
)


def cpu(config: Config) -> Iterator[Problem]:
    if config.launch.device != "cpu":
        return
    for key in NOT_ON_CPU:
        if config[key]:
            yield config.problem(key, "is not available on CPU")
    for key in ("ds.ring_attn_size", "ds.tensor_parallel_size"):
        if config[key] > 1:
            yield config.problem(key, "must be 1 on CPU")
    for key in ("actor.optim", "critic.optim"):
        if config[key] == "muon":
            yield config.problem(key, "must be adam on CPU")
    # The trainer fits its own defaults to the CPU; what a configuration says it would have to overrule.
    for key, fit in (("ds.attn_implementation", ("sdpa", "eager")), ("vllm.sync_backend", ("gloo",))):
        if key in config.settings and config[key] not in fit:
            yield config.problem(key, f"must be {' or '.join(fit)} on CPU")


def tracking(config: Config) -> Iterator[Problem]:
    if config[WANDB_KEY] and "WANDB_API_KEY" not in os.environ:
        yield config.problem(WANDB_KEY, "export WANDB_API_KEY, or leave this out")


CHECKS: tuple[Check, ...] = (
    required,
    batches,
    generation,
    algorithm,
    importance_sampling,
    length_penalties,
    evaluation,
    sharing,
    modes,
    cpu,
    tracking,
    *RAGGED_CHECKS,
)
