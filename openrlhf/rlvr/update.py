"""The actor's update by the methods of a run, put in where upstream's trainer calls its actor, its loss and its loop.

Statistics of tokens come from the actor's one forward pass. What a method must know of the whole optimizer step comes
from that pass where the step is one micro-batch, else from a pass without gradients over all of them before the first
backward.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.repeat.seeds import derive
from openrlhf.rlvr.aggregation import aggregate
from openrlhf.rlvr.entropy import EntropyBonus, EntropyReward, scheduled
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.objective import Objective, Summary
from openrlhf.rlvr.policy_losses import UPSTREAMS, aggregation
from openrlhf.rlvr.policy_metrics import PolicyMetrics, certainty, effective_sharpness
from openrlhf.rlvr.samples import Sample
from openrlhf.rlvr.statistics import Statistics, responses
from openrlhf.rlvr.token_sums import Wanted

Told = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""What upstream's loss returns: loss, clipped share, KL to the old policy, KL to the engine, share filtered by it."""

NUMBERS = 1 << 16
"""More samples than this one prompt never gets in a batch: with the draw, their number makes a sample's id."""


def is_ours(args: Any) -> bool:
    """Whether a run's update is not one that upstream has."""
    objective = Objective.of(args)
    methods = (objective.modulation, objective.forks, objective.entropy, objective.gtpo)
    return (
        args.actor.policy_loss_type not in UPSTREAMS
        or args.actor.loss_agg_mode == "seq-mean-token-sum-norm"
        or any(method.enable for method in methods)
        or args.actor.token_stats is not None
        or EntropyReward.of(args).coef > 0  # type: ignore[attr-defined]
        or PolicyMetrics.of(args) != PolicyMetrics()  # type: ignore[attr-defined]
    )


class MethodLoss:
    """Takes the place of upstream's policy loss, and sees more of the experience and of the model's output.

    Attributes:
        summary: of the optimizer step that is under way; None where each step is one micro-batch.
        metrics: sums and counts since the last update ended, by name.
    """

    def __init__(self, args: Any) -> None:
        self.objective = Objective.of(args)
        self.mode, self.max_length = aggregation(args)
        self.seed: int = args.train.seed
        self.told: PolicyMetrics = PolicyMetrics.of(args)  # type: ignore[attr-defined]
        self.entropy_coef: float | None = args.actor.entropy_coef
        self.summary: Summary | None = None
        self.metrics: dict[str, torch.Tensor] = {}

    @property
    def wanted(self) -> Wanted:
        """Statistics of tokens that the methods read."""
        needs, told, bonus = self.objective.needs, self.told.policy, self.entropy_coef
        unrouted = getattr(self.objective.options, "variant", None) == "unrouted"
        return Wanted(
            entropy="entropy" in needs or told or bonus is not None,
            mode=bool({"is_mode", "mode_log_prob"} & needs) or told,
            square_term="square_term" in needs,
            entropy_gradient=bool(bonus),
            mode_gradient=unrouted,
        )

    def micro_batch(self, experience: Any, log_probs: torch.Tensor, output: Any) -> MicroBatch:
        """What the objective reads, of the response tokens: shape (B, A), as the action mask."""
        width = experience.action_mask.shape[1]

        def responses(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[:, :-1][:, -width:]

        needs, stats = self.objective.needs, output.statistics
        return MicroBatch(
            log_probs=log_probs,
            old_log_probs=experience.action_log_probs,
            advantages=experience.advantages,
            mask=experience.action_mask,
            entropy=responses(stats.entropy),
            is_mode=responses(stats.is_mode),
            mode_log_prob=responses(stats.mode_log_prob),
            square_term=responses(stats.square_term),
            rollout_log_probs=experience.rollout_log_probs if "rollout_log_probs" in needs else None,
            conflict_weights=experience.conflict_weights if "conflict_weights" in needs else None,
            samples=_ids(experience.samples, log_probs.device) if "samples" in needs else None,
            vocabulary=output.vocabulary,
        )

    def __call__(
        self,
        batch: MicroBatch,
        summary: Summary,
        *,
        dp_size: int,
        batch_num_tokens: Any,
        global_batch_size: Any,
    ) -> Told:
        """Loss of a micro-batch, and the metrics that upstream's loss gives: clipped share, KL, and the engine's."""
        terms, counted = self.objective.terms(batch, summary)
        loss = aggregate(
            terms.loss,
            counted,
            self.mode,
            batch_num_tokens=batch_num_tokens * summary.tokens,
            global_batch_size=global_batch_size * summary.samples,
            dp_size=dp_size,
            max_length=self.max_length,
        )
        told = {f"methods/{name}": metric for name, metric in terms.metrics.items()}
        for name, (total, count) in (told | (certainty(batch) if self.told.policy else {})).items():
            pair = torch.stack([total.double(), count.double()])
            self.metrics[name] = self.metrics.get(name, torch.zeros_like(pair)) + pair
        kl = batch.average(-batch.raw_log_ratio)
        means = {name: _mean(pair) for name, pair in terms.metrics.items()}
        clipped = means.get("ppo_clip_ratio", torch.zeros_like(kl[0]))
        return loss, clipped, _mean(kl), means.get("vllm_kl"), means.get("is_filter_ratio")


def _mean(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[0] / pair[1].clamp(min=1)


def _ids(samples: list[Sample | None], device: Any) -> torch.Tensor:
    """Numbers of samples, the same wherever they go; fillers have none of their own, nor tokens."""
    ids = [0 if one is None else one.group.draw * NUMBERS + one.number for one in samples]
    return torch.tensor(ids, dtype=torch.int64, device=device)


def policy_loss(trainer: Any, upstream: Callable[..., Any], **options: Any) -> Any:
    """The loss of an actor's trainer: upstream's, or the methods of the run, which its actor then computes for."""
    if not is_ours(trainer.args):
        return upstream(**options)
    loss = MethodLoss(trainer.args)
    watched(trainer.actor, trainer.args, loss.wanted)
    return loss


def watched(actor: Any, args: Any, learning: Wanted | None = None) -> Any:
    """An actor, told to compute the statistics of tokens that a run wants; upstream's own where it wants none."""
    if is_ours(args):
        sampling = Wanted(entropy=EntropyReward.of(args).coef > 0 and learning is not None)  # type: ignore[attr-defined]
        actor.token_statistics = Statistics.of(args, actor.model, learning or Wanted(), sampling)
    return actor


def update_loss(
    trainer: Any, experience: Any, output: Any, log_probs: torch.Tensor, *given: Any, **options: Any
) -> Told:
    """The loss of a micro-batch, by upstream's loss, whose arguments come last, or by the methods of the run."""
    loss = trainer.actor_loss_fn
    if not isinstance(loss, MethodLoss):
        found: Told = loss(log_probs, *given, **options)
        return found
    batch = loss.micro_batch(experience, log_probs, output)
    summary = loss.summary or loss.objective.summarise([batch], _seed(trainer), _ranks(trainer))
    normalisers = {name: options[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    return loss(batch, summary, **normalisers)


def summarised(trainer: Any, micro_batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The micro-batches of an update; before the first of an optimizer step, what must be known of all of them."""
    loss = trainer.actor_loss_fn
    if not isinstance(loss, MethodLoss) or not loss.objective.needs_summary:
        yield from micro_batches
        return
    step: list[tuple[Any, Any]] = []
    ends = trainer.replay_buffer.dynamic_optimizer_step if trainer.args.train.dynamic_batch_enable else None
    for place, item in enumerate(micro_batches):
        step.append(item)
        if ends[place] if ends else len(step) == trainer.strategy.accumulated_gradient:
            loss.summary = _look_ahead(trainer, [experience for experience, _ in step]) if len(step) > 1 else None
            yield from step
            step = []
    assert not step, "micro-batches that fill no optimizer step"


@torch.no_grad()
def _look_ahead(trainer: Any, experiences: list[Any]) -> Summary:
    """Statistics of all micro-batches of an optimizer step, before any of them is learnt from."""
    trainer.actor.train()
    batches = []
    for experience in experiences:
        log_probs, output = responses(trainer, experience, return_output=True)
        batches.append(trainer.actor_loss_fn.micro_batch(experience, log_probs, output))
    summary: Summary = trainer.actor_loss_fn.objective.summarise(batches, _seed(trainer), _ranks(trainer))
    return summary


def _seed(trainer: Any) -> int:
    """Of an optimizer step, the same on all ranks."""
    return derive(trainer.actor_loss_fn.seed, "selection", trainer.actor.model.global_steps)


def _ranks(trainer: Any) -> Any:
    group = trainer.strategy.ds_device_mesh["dp"].get_group()
    return group if dist.get_world_size(group) > 1 else None


def with_metrics(trainer: Any, status: dict[str, float]) -> dict[str, float]:
    """The status of an update and what its methods did, in means over all ranks and micro-batches."""
    loss = trainer.actor_loss_fn
    if not isinstance(loss, MethodLoss):
        return status
    every = loss.told.sharpness_steps
    if every and _steps_done(trainer) % every == 0:
        status = status | effective_sharpness(trainer, _ranks(trainer))
    if not loss.metrics:
        return status
    names = sorted(loss.metrics)
    pairs = torch.stack([loss.metrics[name] for name in names])
    if group := _ranks(trainer):
        dist.all_reduce(pairs, group=group)
    loss.metrics = {}
    return status | {name: total / max(count, 1) for name, (total, count) in zip(names, pairs.tolist(), strict=True)}


def entropy_coef(trainer: Any) -> float:
    """Coefficient of upstream's entropy loss at this training step."""
    steps = EntropyBonus.of(trainer.args).entropy_steps  # type: ignore[attr-defined]
    return scheduled(trainer.args.actor.entropy_coef, steps, _steps_done(trainer) + 1)


def _steps_done(trainer: Any) -> int:
    """Training steps of the run, by its optimizer steps, of which a short batch at an episode's end has fewer."""
    args = trainer.args
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    updates = max(1, samples // args.train.batch_size * args.train.max_epochs)
    done: int = trainer.actor.model.global_steps // updates
    return done
