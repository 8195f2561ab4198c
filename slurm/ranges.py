"""Which values each flag makes sense with, as data: what argparse lets through would fail later, or mislead."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slurm.config import Config
from slurm.problems import Problem


@dataclass(frozen=True)
class Range:
    """Bounds of one flag's finite value; `above` leaves out `low` itself, `never` lets -1 in for "never"."""

    key: str
    low: int
    high: float = math.inf
    above: bool = False
    never: bool = False
    reason: str = ""

    def holds(self, value: float) -> bool:
        if self.never and value == -1:
            return True
        return math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low)

    @property
    def words(self) -> str:
        """The range as an error message has it."""
        low = f"above {self.low}" if self.above else f"{self.low} or more"
        bounds = f"{low} and finite" if self.above else low
        if self.high < math.inf:
            bounds = f"{low} and at most {self.high:.0f}"
        return f"must be {bounds}{', or -1 for never' * self.never}{': ' * bool(self.reason)}{self.reason}"


RANGES = (
    Range("train.seed", 0, 2**32 - 1, reason="NumPy takes no other seeds"),
    *(Range(f"{model}.{optim}.lr", 0, above=True) for model in ("actor", "critic") for optim in ("adam", "muon")),
    Range("rollout.temperature", 0, above=True, reason="the trainer divides logits by it"),
    Range("eval.temperature", 0, reason="0 is greedy"),
    Range("rollout.top_p", 0, 1, above=True),
    Range("vllm.gpu_memory_utilization", 0, 1, above=True),
    Range("algo.allocation.exponent", 0, above=True),
    *(Range(f"algo.allocation.{part}", 0, 1, above=True) for part in ("decay", "mastery")),
    Range("algo.allocation.min_history", 2, reason="one sample has no variance"),
    *(Range(f"algo.allocation.{end}_samples", 1) for end in ("min", "max")),
    Range("ds.zero_stage", 0, 3),
    Range("vllm.num_engines", 0),
    Range("data.max_images_per_prompt", 0),
    *(
        Range(f"{part}.{size}", 0)
        for part in ("ref", "critic", "reward")
        for size in ("num_nodes", "num_gpus_per_node")
    ),
    *(Range(f"actor.{size}", 1) for size in ("num_nodes", "num_gpus_per_node")),
    *(
        Range(key, 1)
        for key in (
            *("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.micro_batch_size"),
            *("rollout.vllm_generate_batch_size", "rollout.max_new_tokens", "rollout.max_tokens_per_gpu"),
            *("train.batch_size", "train.micro_batch_size", "train.max_tokens_per_gpu", "train.async_queue_size"),
            *("train.num_episodes", "train.max_epochs", "data.max_len", "data.max_samples"),
            *("ds.ring_attn_size", "ds.tensor_parallel_size", "vllm.tensor_parallel_size"),
            *("eval.n_samples_per_prompt", "logger.logging_steps"),
        )
    ),
    *(Range(key, 1, never=True) for key in ("eval.steps", "ckpt.save_steps")),
)

SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)
"""Names of transformers' SchedulerType; the trainer asks transformers for the one that is given."""


def values(config: Config) -> Iterator[Problem]:
    """Values that are out of their range, or names that are not known."""
    for each in RANGES:
        if config[each.key] is not None and not each.holds(config[each.key]):
            yield config.problem(each.key, each.words)
    for key in ("actor.lr_scheduler", "critic.lr_scheduler"):
        if config[key] not in SCHEDULERS:
            yield config.problem(key, f"must be one of {', '.join(SCHEDULERS)}")
