"""Experience of ragged groups: batches for every rank, advantages by group, and what is told of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from openrlhf.models.utils import compute_reward
from openrlhf.rlvr.advantages import ESTIMATORS, GroupAdvantage, differing, group_advantages, per_group
from openrlhf.rlvr.allocation import Allocation
from openrlhf.rlvr.batching import micro_batches, with_fillers
from openrlhf.rlvr.diagnostics import sharpness
from openrlhf.rlvr.entropy import EntropyReward, scheduled
from openrlhf.rlvr.gtpo import Gtpo, conflict_weights
from openrlhf.rlvr.ragged import is_ragged
from openrlhf.rlvr.records import JsonLines, histogram
from openrlhf.rlvr.samples import Group, Sample
from openrlhf.rlvr.w_reinforce import WReinforce, w_reinforce
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

PER_SAMPLE = ("response_length", "total_length", "truncated")
"""Fields of an experience that upstream averages over samples, beside its ``info``."""

WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators whose advantages upstream normalises over all tokens of a batch."""


@dataclass(frozen=True)
class Batch:
    """The samples of a batch in the order of their dispatch, fillers last; all tensors have shape (S,).

    Args:
        samples: whose they are; None for a filler.
        groups: int64 ids of their groups; -1 for fillers.
        lengths: int64, response tokens.
        verified: rewards before length penalties.
        shaped: rewards with them.
        values: advantages of the samples, without KL penalty and normalisation over the batch.
    """

    samples: list[Sample | None]
    groups: torch.Tensor
    lengths: torch.Tensor
    verified: torch.Tensor
    shaped: torch.Tensor
    values: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """Samples that are neither fillers nor without a response; bool, shape (S,)."""
        return (self.groups >= 0) & (self.lengths > 0)


class RaggedExperienceMaker(RemoteExperienceMaker):
    """Upstream's, for groups of any sizes, told apart by their ids.

    Where all groups have one size the results are upstream's bit for bit, except that a group of equal rewards has
    advantage 0 where upstream magnifies rounding noise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options: GroupAdvantage = GroupAdvantage.of(self.args)  # type: ignore[attr-defined]
        self._bounds = Allocation.of(self.args).bounds(self.args.rollout.n_samples_per_prompt)  # type: ignore[attr-defined]
        self._records = JsonLines(self.args, "updates.jsonl")
        self._batch: Batch
        self.step = 1
        self._compared = {name: getattr(self._options, name) for name in ("penalties", "ddof", "group_weight")}

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Batches for the forward passes: equally many samples and micro-batches for each rank of every model."""
        args = self.args
        models = (self.actor_model_group, self.initial_model_group, self.critic_model_group, self.reward_model_group)
        ranks = math.lcm(*(len(one._actor_handlers) // one.duplicate_actors for one in models if one is not None))
        samples = with_fillers(rollout_samples, args.train.batch_size)  # a multiple of all ranks, checked at the start
        for place, sample in enumerate(samples):
            sample.index = [place]
        if args.train.dynamic_batch_enable:
            cap = args.rollout.max_tokens_per_gpu * args.ds.ring_attn_size * args.ds.tensor_parallel_size
            parts = micro_batches([int(one.total_length) for one in samples], cap, ranks)
        else:
            share, size = len(samples) // ranks, args.rollout.micro_batch_size
            starts = [start for first in range(0, len(samples), share) for start in range(first, first + share, size)]
            ends = [min(start + size, (start // share + 1) * share) for start in starts]
            parts = [list(range(start, end)) for start, end in zip(starts, ends, strict=True)]
        pad = self.tokenizer.pad_token_id
        return [Experience.concat_experiences([samples[one] for one in part], pad) for part in parts]

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Advantages and returns of each token; rewards keep their dtype, at least float32."""
        for experience in experiences:
            experience.rewards = experience.rewards.to(torch.promote_types(experience.rewards.dtype, torch.float32))
        places = torch.tensor([place for experience in experiences for place in experience.index])
        batch = self._batch = self._compare(experiences, places.argsort())
        sizes = [len(experience.index) for experience in experiences]
        deviations = per_group(batch.shaped, batch.groups, _deviation, batch.groups >= 0)
        if Gtpo.of(self.args).enable:  # type: ignore[attr-defined]
            _weigh_conflicts(experiences, batch, places)
        parts = zip(experiences, batch.values[places].split(sizes), deviations[places].split(sizes), strict=True)
        for experience, values, deviation in parts:
            experience.info["group_reward_std"] = deviation
            self._spread_over_tokens(experience, values)
        if self.advantage_estimator in WHITENED:
            self._whiten(experiences)
        taught = _taught(batch)
        if self._options.drop_zero_variance and self.advantage_estimator in ESTIMATORS and taught.any():
            for experience, keep in zip(experiences, taught[places].split(sizes), strict=True):
                experience.action_mask = experience.action_mask * keep.unsqueeze(-1)
        return experiences

    def _compare(self, experiences: Sequence[Experience], order: torch.Tensor) -> Batch:
        """Put the samples in order and compare them within their groups."""

        def ordered(name: str) -> torch.Tensor:
            return torch.cat([getattr(experience, name) for experience in experiences])[order]

        unordered = [sample for experience in experiences for sample in experience.samples]
        samples = [unordered[place] for place in order.tolist()]
        groups = torch.tensor([-1 if sample is None else sample.group.draw for sample in samples])
        lengths = torch.cat([experience.action_mask.sum(-1) for experience in experiences])[order].long()
        verified = ordered("rewards").clone()
        apply_length_penalties(experiences, self.args)
        if coef := self._entropy_coef():
            for experience in experiences:
                experience.rewards = experience.rewards + coef * experience.info["entropy"].to(experience.rewards)
        batch = Batch(samples, groups, lengths, verified, ordered("rewards"), torch.empty(0))
        return replace(batch, values=self._values(batch))

    def _entropy_coef(self) -> float:
        reward: EntropyReward = EntropyReward.of(self.args)  # type: ignore[attr-defined]
        return scheduled(reward.coef, reward.steps, self.step)

    def _values(self, batch: Batch) -> torch.Tensor:
        if self.advantage_estimator in ESTIMATORS:
            rewards, shaped, estimator = batch.verified, batch.shaped, self.advantage_estimator
            return group_advantages(
                rewards, batch.groups, estimator, shaped=shaped, valid=batch.valid, **self._compared
            )
        if self.advantage_estimator == "w_reinforce":
            correct = torch.tensor([bool(sample and sample.correct) for sample in batch.samples])
            return w_reinforce(correct, WReinforce.of(self.args), batch.valid)  # type: ignore[attr-defined]
        if self.advantage_estimator == "flash_reinforce":
            return batch.shaped - batch.shaped[batch.valid].mean()
        return batch.shaped

    def _spread_over_tokens(self, experience: Experience, values: torch.Tensor) -> None:
        """Advantages and returns of tokens, from the advantage that each sample earns at its end and the KL penalty."""
        args, mask = self.args, experience.action_mask
        rewards = compute_reward(
            values, self.kl_ctl.value, experience.kl, action_mask=mask, reward_clip_range=args.reward.clip_range
        )
        if self.advantage_estimator == "gae":
            gamma, lambd = args.algo.advantage.gamma, args.algo.advantage.lambd
            made = self.get_advantages_and_returns(experience.values, rewards, mask, gamma, lambd)
            experience.advantages, experience.returns = made
        else:
            gamma = args.algo.advantage.gamma if self.advantage_estimator == "reinforce" else 1.0
            experience.returns = self.get_cumulative_returns(rewards, mask, gamma)
            experience.advantages = experience.returns.clone()
        experience.info["return"] = rewards.sum(dim=-1)
        experience.kl = None

    def _whiten(self, experiences: Sequence[Experience]) -> None:
        """Subtract the mean over all tokens of the batch, and divide by their standard deviation unless told not to."""
        advantages = torch.cat([one.advantages.flatten() for one in experiences]).float()
        masks = torch.cat([one.action_mask.flatten() for one in experiences])
        count = masks.sum().clamp(min=1)
        mean = (advantages * masks).sum() / count
        scale: torch.Tensor | float = 1
        if not self.args.algo.advantage.no_std_norm:
            scale = (((advantages - mean).pow(2) * masks).sum() / count).clamp(min=1e-8).rsqrt()
        for experience in experiences:
            experience.advantages = (experience.advantages - mean) * scale

    def tell(self, trainer: Any, experiences: list[Experience], step: int) -> dict[str, float]:
        """Record the groups of a step; returns the metrics of its rollout, without fillers."""
        batch = self._batch
        fillers = sum(sample is None for sample in batch.samples)
        kept = [_without_fillers(one) for one in experiences] if fillers else experiences
        stats: dict[str, float] = trainer._compute_rollout_stats(kept)
        if fillers:
            stats |= _means(kept, {"kl", "logprobs_diff"} if self.args.algo.kl.use_loss else set())
        rows = _rows(batch)
        self._records.append([{"step": step, "estimator": self.advantage_estimator, **self._compared, "groups": rows}])
        return stats | self._metrics(batch)

    def _metrics(self, batch: Batch) -> dict[str, float]:
        groups = _groups(batch)
        counts = torch.tensor([len(places) for places in groups.values()], dtype=torch.float)
        if self.advantage_estimator in ESTIMATORS:
            informative = _taught(batch)
        else:
            informative = differing(batch.shaped, batch.groups, batch.valid)
        uniform = sum(not informative[places].any() for places in groups.values())
        new = sum(group.weight is None for group in groups)
        return {
            "groups/effective_samples": float(informative.sum()),
            "groups/zero_variance": uniform / len(groups),
            "groups/new_prompts": new / len(groups),
            **self._sharpness(batch),
            "groups/count_mean": counts.mean().item(),
            "groups/count_std": counts.std(correction=0).item(),
            "groups/count_min": counts.min().item(),
            "groups/count_max": counts.max().item(),
            **histogram(counts.tolist(), *self._bounds),
        }

    def _sharpness(self, batch: Batch) -> dict[str, float]:
        """Mean κ of the groups with a right and a wrong sample, or without a KL penalty the gap A⁺ − A⁻."""
        verdicts = [None if one is None else one.correct for one in batch.samples]
        known = torch.tensor([verdict is not None for verdict in verdicts]) & batch.valid
        if not known.any():
            return {}
        correct = torch.tensor([bool(verdict) for verdict in verdicts])
        values = batch.values.nan_to_num().double()
        beta = self.kl_ctl.value
        found = sharpness(values[known], correct[known], batch.groups[known], beta)
        both = found[found == found]
        name = "groups/sharpness" if beta else "groups/advantage_gap"
        return {name: float(both.mean())} if len(both) else {}


def _weigh_conflicts(experiences: Sequence[Experience], batch: Batch, places: torch.Tensor) -> None:
    """Give every token GTPO's weight, which follows from all samples of its group, wherever they lie."""
    width = max(one.action_mask.shape[1] for one in experiences)

    def widened(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, width - values.shape[1]))

    tokens = torch.cat([widened(one.sequences[:, 1:]) for one in experiences])
    mask = torch.cat([widened(one.action_mask) for one in experiences])
    correct = torch.tensor([bool(sample and sample.correct) for sample in batch.samples])[places]
    weights = conflict_weights(tokens, mask, correct, batch.groups[places])
    for one, own in zip(experiences, weights.split([len(one.index) for one in experiences]), strict=True):
        one.conflict_weights = own[:, : one.action_mask.shape[1]]


def _groups(batch: Batch) -> dict[Group, list[int]]:
    """Places of the samples of each group, in order."""
    found: dict[Group, list[int]] = {}
    for place, sample in enumerate(batch.samples):
        if sample is not None:
            found.setdefault(sample.group, []).append(place)
    return found


def _rows(batch: Batch) -> list[dict[str, Any]]:
    """The groups of a batch as updates.jsonl has them."""
    rows = []
    for group, places in _groups(batch).items():
        verdicts = [sample.correct for place in places if (sample := batch.samples[place])]
        tensors = {"lengths": batch.lengths, "rewards": batch.verified, "advantages": batch.values}
        if not torch.equal(batch.shaped[places], batch.verified[places]):
            tensors["shaped"] = batch.shaped
        told = ("draw", "prompt_id", "source", "seen", "right", "weight", "count")
        row = {name: getattr(group, name) for name in told}
        row["correct"] = None if None in verdicts else sum(map(bool, verdicts))
        rows.append(row | {name: tensor[places].tolist() for name, tensor in tensors.items()})
    return rows


def _deviation(rewards: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row, as upstream reports it; 0 for groups of one."""
    if rewards.shape[-1] == 1:
        return torch.zeros_like(rewards)
    return rewards.std(-1, keepdim=True).expand_as(rewards)


def _taught(batch: Batch) -> torch.Tensor:
    """Whether a sample's group holds an advantage; bool, shape (S,)."""
    return per_group(batch.values.abs(), batch.groups, _greatest, batch.valid) > 0


def _greatest(values: torch.Tensor) -> torch.Tensor:
    return values.amax(-1, keepdim=True).expand_as(values)


def _without_fillers(experience: Experience) -> Experience:
    """What metrics are made of, for the real samples of a batch."""
    real = torch.tensor([sample is not None for sample in experience.samples])
    info = {name: torch.as_tensor(value)[real] for name, value in experience.info.items()}
    return Experience(info=info, **{name: getattr(experience, name)[real] for name in PER_SAMPLE})


def _means(experiences: Sequence[Experience], left_out: set[str]) -> dict[str, float]:
    """Means over samples, under the names that upstream gives them after an update, in which fillers count."""
    columns = [{**one.info, **{name: getattr(one, name) for name in PER_SAMPLE}} for one in experiences]
    names = set(columns[0]) - left_out
    return {name: torch.cat([column[name].float() for column in columns]).mean().item() for name in names}


def at_step(maker: Any, step: int) -> Any:
    """A maker that knows of which training step its next experience is, from 1."""
    maker.step = step
    return maker


def experience_maker(*args: Any) -> RemoteExperienceMaker:
    """The maker that a run's flags ask for; the strategy is upstream's sixth argument."""
    return (RaggedExperienceMaker if is_ragged(args[5].args) else RemoteExperienceMaker)(*args)


def rollout_metrics(trainer: Any, experiences: list[Experience], step: int) -> dict[str, float]:
    """Metrics of a step's rollout: upstream's, and those of the groups where they are ragged."""
    maker = trainer.experience_maker
    if isinstance(maker, RaggedExperienceMaker):
        return maker.tell(trainer, experiences, step)
    stats: dict[str, float] = trainer._compute_rollout_stats(experiences)
    return stats
