"""Whether a run's groups may be of different sizes, and so pass through our modules instead of upstream's."""

from argparse import Namespace
from typing import Any

from openrlhf.rlvr.advantages import GroupAdvantage
from openrlhf.rlvr.allocation import Allocation
from openrlhf.rlvr.entropy import EntropyReward
from openrlhf.rlvr.flags import start_up_check
from openrlhf.rlvr.fork_tokens import ForkTokens
from openrlhf.rlvr.gtpo import Gtpo
from openrlhf.rlvr.modulation import Modulation
from openrlhf.rlvr.policy_losses import LOSSES
from openrlhf.utils.config import hierarchize


def is_ragged(args: Any) -> bool:
    """True where a flag of ours asks for an allocation, a comparison of samples, or the sample that a token is of."""
    return (
        Allocation.of(args).strategy is not None  # type: ignore[attr-defined]
        or args.algo.advantage.estimator in ("reward_budget", "w_reinforce")
        or GroupAdvantage.of(args) != GroupAdvantage()  # type: ignore[attr-defined]
        or Gtpo.of(args).enable  # type: ignore[attr-defined]
        or ForkTokens.of(args).enable  # type: ignore[attr-defined]
        or EntropyReward.of(args).coef > 0  # type: ignore[attr-defined]
        or _compares_a_step(Modulation.of(args))  # type: ignore[attr-defined]
        or LOSSES[args.actor.policy_loss_type].select is not None
    )


def _compares_a_step(modulation: Modulation) -> bool:
    """Such a step must be whole, and only ragged batches are filled up at an episode's end."""
    return modulation.enable and modulation.scope == "minibatch"


@start_up_check
def batch_problems(flags: dict[str, Any]) -> list[str]:
    """Batches that ragged groups could not be spread over: ranks, token caps, generation."""
    if not is_ragged(hierarchize(Namespace(**flags))):
        return []
    return [*_uneven_ranks(flags), *_narrow_caps(flags), *_small_generation(flags)]


def _uneven_ranks(flags: dict[str, Any]) -> list[str]:
    width = flags["ds.ring_attn_size"] * flags["ds.tensor_parallel_size"]
    used = {
        "actor": True,
        "ref": flags["algo.kl.init_coef"] > 0,
        "critic": flags["algo.advantage.estimator"] == "gae",
        "reward": not (flags["reward.remote_url"] or flags["train.agent_func_path"]),
    }
    found = []
    for model in (model for model, needed in used.items() if needed):
        ranks = max(1, flags[f"{model}.num_nodes"] * flags[f"{model}.num_gpus_per_node"] // width)
        if flags["train.batch_size"] % ranks:
            found.append(
                f"--train.batch_size {flags['train.batch_size']}: must be a multiple of the {ranks} ranks of the "
                f"{model} model (--{model}.num_nodes x --{model}.num_gpus_per_node)"
            )
    return found


def _narrow_caps(flags: dict[str, Any]) -> list[str]:
    if not flags["train.dynamic_batch_enable"]:
        return []
    width, longest = flags["ds.ring_attn_size"] * flags["ds.tensor_parallel_size"], flags["data.max_len"]
    return [
        f"--{name} {flags[name]}: a sample of --data.max_len {longest} tokens would not fit; give "
        f"{-(-longest // width)} or more, or lower --data.max_len"
        for name in ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu")
        if flags[name] is not None and flags[name] * width < longest
    ]


def _small_generation(flags: dict[str, Any]) -> list[str]:
    generated, batch = flags["rollout.vllm_generate_batch_size"], flags["rollout.batch_size"]
    if not generated or generated >= batch:
        return []
    return [
        f"--rollout.vllm_generate_batch_size {generated}: no training batch would be whole below --rollout.batch_size "
        f"{batch}"
    ]
