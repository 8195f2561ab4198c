"""Faults of runs whose prompts get different numbers of samples; the trainer has the same rules, and needs torch."""

from collections.abc import Iterator

from slurm.config import Config
from slurm.placement import has_critic, has_reference, has_reward_function, size
from slurm.problems import Problem
from slurm.schema import trainer_flags

GROUP_COMPARING = ("group_norm", "dr_grpo", "reinforce_baseline", "rloo", "reward_budget")
"""Estimators that compare the samples of a prompt."""

OPTIONS = {
    "algo.advantage.ddof": ("group_norm",),
    "algo.advantage.group_weight": GROUP_COMPARING,
    "algo.advantage.drop_zero_variance": GROUP_COMPARING,
    "algo.advantage.penalties": ("reward_budget",),
}
"""Options of advantages, and the estimators that they are for."""

DYNAMIC_ONLY = ("min_samples", "max_samples", "exponent", "min_history", "mastery", "decay")


def is_ragged(config: Config) -> bool:
    """Whether groups go through the fork's own batching, which cuts updates to whatever samples there are."""
    return (
        config["algo.allocation.strategy"] is not None
        or config["algo.advantage.estimator"] in ("reward_budget", "w_reinforce")
        or config["actor.policy_loss_type"] in ("clip_cov", "kl_cov")
        or config["actor.fork_tokens.enable"]
        or config["algo.gtpo.enable"]
        or config["algo.entropy_reward.coef"] > 0
        or (config["algo.modulation.enable"] and config["algo.modulation.scope"] == "minibatch")
        or any(_is_set(config, option) for option in OPTIONS)
    )


def _is_set(config: Config, key: str) -> bool:
    return bool(config[key] != trainer_flags()[key].default)


def allocation(config: Config) -> Iterator[Problem]:
    average = config["rollout.n_samples_per_prompt"]
    if config["algo.allocation.strategy"] != "dynamic":
        for name in DYNAMIC_ONLY:
            if _is_set(config, f"algo.allocation.{name}"):
                yield config.problem(
                    f"algo.allocation.{name}", "does nothing without algo.allocation.strategy: dynamic"
                )
        return
    yield from _bounds(config, average)
    if not has_reward_function(config):
        yield config.problem(
            "algo.allocation.strategy",
            "needs to be told which samples are right: set reward.remote_url or train.agent_func_path",
        )


def _bounds(config: Config, average: int) -> Iterator[Problem]:
    """Bounds within which every batch can spend its samples."""
    fewest, most = config["algo.allocation.min_samples"], config["algo.allocation.max_samples"]
    if fewest is not None and fewest > average:
        yield config.problem(
            "algo.allocation.min_samples",
            f"a batch has rollout.n_samples_per_prompt {average} samples for each prompt and could not give every one "
            f"{fewest}: write {average} or less",
        )
    if most is not None and most < average:
        yield config.problem(
            "algo.allocation.max_samples",
            f"a batch has rollout.n_samples_per_prompt {average} samples for each prompt and could not spend them all "
            f"with {most}: write {average} or more",
        )
    if config["algo.dynamic_filtering_enable"] and (average // 2 if fewest is None else fewest) < 2:
        yield config.problem(
            "algo.allocation.min_samples",
            "dynamic filtering rejects every prompt with one sample, and unset this is half of "
            f"rollout.n_samples_per_prompt {average}: write 2 or more",
        )
    decay, history = config["algo.allocation.decay"], config["algo.allocation.min_history"]
    if 0 < decay < 1 and (-(-3 * average // 2) if most is None else most) / (1 - decay) <= history:
        yield config.problem("algo.allocation.min_history", f"no prompt ever has as many with decay {decay}")


def advantages(config: Config) -> Iterator[Problem]:
    estimator = config["algo.advantage.estimator"]
    for option, estimators in OPTIONS.items():
        if _is_set(config, option) and estimator not in estimators:
            yield config.problem(
                option, f"does nothing with algo.advantage.estimator {estimator}; it is for {', '.join(estimators)}"
            )


def shared_batches(config: Config) -> Iterator[Problem]:
    """Every model takes equal shares of a batch, and training batches are generated whole."""
    if not is_ragged(config):
        return
    width = config["ds.ring_attn_size"] * config["ds.tensor_parallel_size"]
    used = {"ref": has_reference(config), "critic": has_critic(config), "reward": not has_reward_function(config)}
    for model in ("actor", *(model for model, needed in used.items() if needed)):
        ranks = max(1, size(config, model) // width)
        if config["train.batch_size"] % ranks:
            yield config.problem("train.batch_size", f"must be a multiple of the {ranks} ranks of the {model} model")
    generated, batch = config["rollout.vllm_generate_batch_size"], config["rollout.batch_size"]
    if generated and generated < batch:
        yield config.problem(
            "rollout.vllm_generate_batch_size",
            f"is below rollout.batch_size {batch}, and samples are shared out over whole batches: leave it out",
        )


def token_caps(config: Config) -> Iterator[Problem]:
    """No sample may be longer than a micro-batch of dynamic batching."""
    if not is_ragged(config) or not config["train.dynamic_batch_enable"]:
        return
    width = config["ds.ring_attn_size"] * config["ds.tensor_parallel_size"]
    longest = config["data.max_len"]
    for key in ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"):
        cap = config[key]
        if cap is not None and longest > cap * width:
            together = f" x ds.ring_attn_size x ds.tensor_parallel_size = {cap * width} tokens" if width > 1 else ""
            yield config.problem(
                key,
                f"a sample of data.max_len {longest} tokens would not fit into {cap}{together}: "
                f"write {-(-longest // width)} or more, or lower data.max_len",
            )


RAGGED_CHECKS = (allocation, advantages, shared_batches, token_caps)
