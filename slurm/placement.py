"""Which part of the trainer takes how many accelerators, derived from a configuration.

The trainer places each part by these rules when it starts; asked here, a run that cannot be placed is refused at
once instead of waiting for resources that never come.
"""

from slurm.config import Config


def size(config: Config, role: str) -> int:
    """Accelerators of one model's group: nodes times devices of a node."""
    return int(config[f"{role}.num_nodes"] * config[f"{role}.num_gpus_per_node"])


def engine_size(config: Config) -> int:
    """Accelerators of all vLLM engines together."""
    return int((config["vllm.num_engines"] or 0) * config["vllm.tensor_parallel_size"])


def data_parallel_ranks(config: Config) -> int:
    """Ranks of the actor that see different samples."""
    return size(config, "actor") // (config["ds.ring_attn_size"] * config["ds.tensor_parallel_size"])


def has_critic(config: Config) -> bool:
    return bool(config["algo.advantage.estimator"] == "gae")


def has_reference(config: Config) -> bool:
    return bool(config["algo.kl.init_coef"] > 0)


def has_reward_function(config: Config) -> bool:
    """Whether rewards come from a function, an agent or a server, and not from a reward model placed with the rest."""
    return bool(config["reward.remote_url"] or config["train.agent_func_path"])


def accelerators(config: Config) -> dict[str, int]:
    """How many accelerators each part takes for itself; a part that shares another's takes none."""
    together = bool(config["train.colocate_all"])
    engines_apart = not together or config["train.async_enable"]
    needed = {"actor": size(config, "actor"), "vllm": engine_size(config) if engines_apart else 0}
    if has_reference(config):
        needed["ref"] = 0 if together or config["train.colocate_actor_ref"] else size(config, "ref")
    pair_shares = has_critic(config) and config["train.colocate_critic_reward"]
    if has_critic(config):
        needed["critic"] = size(config, "critic") if pair_shares or not together else 0
    if not has_reward_function(config):
        needed["reward"] = 0 if together or pair_shares else size(config, "reward")
    return needed
