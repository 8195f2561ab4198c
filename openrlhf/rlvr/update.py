"""The actor's update by the methods of a run, put in where upstream's trainer calls its actor, its loss and its loop.

Statistics of tokens come from the actor's one forward pass. What a method must know of the whole optimizer step comes
from that pass where the step is one micro-batch, else from a pass without gradients over all of them before the first
backward.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.repeat.seeds import derive
from openrlhf.rlvr.aggregation import aggregate
from openrlhf.rlvr.entropy import EntropyBonus, scheduled
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.objective import Objective, Summary
from openrlhf.rlvr.policy_losses import UPSTREAMS, aggregation
from openrlhf.rlvr.samples import Sample
from openrlhf.rlvr.token_stats import from_logits
from openrlhf.rlvr.token_sums import Wanted
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

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
        self.summary: Summary | None = None
        self.metrics: dict[str, torch.Tensor] = {}

    @property
    def wanted(self) -> Wanted:
        """Statistics of tokens that the methods read."""
        needs = self.objective.needs
        unrouted = getattr(self.objective.options, "variant", None) == "unrouted"
        return Wanted(
            entropy="entropy" in needs,
            mode=bool({"is_mode", "mode_log_prob"} & needs),
            square_term="square_term" in needs,
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
        for name, (total, count) in terms.metrics.items():
            pair = torch.stack([total.double(), count.double()])
            self.metrics[name] = self.metrics.get(name, torch.zeros_like(pair)) + pair
        kl = batch.average(-batch.raw_log_ratio)
        told = {name: _mean(pair) for name, pair in terms.metrics.items()}
        clipped = told.get("ppo_clip_ratio", torch.zeros_like(kl[0]))
        return loss, clipped, _mean(kl), told.get("vllm_kl"), told.get("is_filter_ratio")


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
    trainer.actor.statistics_wanted = loss.wanted
    return loss


def log_probs_of(
    actor: Any, output: Any, tokens: torch.Tensor, action_mask: torch.Tensor | None, upstream: Callable[..., Any]
) -> torch.Tensor:
    """Log-probabilities of tokens by upstream's function, or with the statistics that the run's methods want.

    Args:
        actor: upstream's actor; without ``statistics_wanted`` it is not one that our methods train.
        output: of the model; its logits are scaled by the temperature, and nobody reads them afterwards.
        tokens: the token that follows each position, shape (B, T).
        action_mask: of responses, shape (B, A); without packing, only their positions are computed.
    """
    wanted = getattr(actor, "statistics_wanted", None)
    if wanted is None:
        return upstream(output["logits"], tokens)
    # Upstream's entropy loss needs the logits for a backward of its own.
    learning = actor.training and torch.is_grad_enabled() and not hasattr(output, "entropy")
    mask = None
    if action_mask is not None and action_mask.shape[0] == tokens.shape[0]:
        mask = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        mask[:, -action_mask.shape[1] - 1 : -1] = action_mask.bool()
    chosen = wanted if actor.training else Wanted()
    output.vocabulary = output["logits"].shape[-1]
    output.statistics = from_logits(output["logits"], tokens, wanted=chosen, mask=mask, overwrite=learning)
    return output.statistics.log_probs


def padded(gather: Callable[..., torch.Tensor], output: Any, log_probs: torch.Tensor, *layout: Any) -> torch.Tensor:
    """Packed log-probabilities back in rows, and the other statistics with them."""
    if stats := getattr(output, "statistics", None):
        values = {
            name: gather(value, *layout) for name, value in vars(stats).items() if isinstance(value, torch.Tensor)
        }
        output.statistics = replace(stats, **values)
        return values["log_probs"]
    return gather(log_probs, *layout)


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
        experience.to_device(trainer.actor.model.device)
        images = experience.mm_train_inputs if getattr(trainer.actor, "is_vlm", False) else None
        log_probs, output = trainer.actor(
            experience.sequences,
            experience.action_mask,
            attention_mask=experience.attention_mask,
            return_output=True,
            ring_attn_group=trainer.strategy.ring_attn_group,
            **(merge_mm_train_inputs(images, experience.sequences.device) if images else {}),
        )
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
    if not isinstance(loss, MethodLoss) or not loss.metrics:
        return status
    names = sorted(loss.metrics)
    pairs = torch.stack([loss.metrics[name] for name in names])
    if group := _ranks(trainer):
        dist.all_reduce(pairs, group=group)
    loss.metrics = {}
    return status | {
        f"methods/{name}": total / max(count, 1) for name, (total, count) in zip(names, pairs.tolist(), strict=True)
    }


def entropy_coef(trainer: Any) -> float:
    """Coefficient of upstream's entropy loss at this training step."""
    args = trainer.args
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    updates = max(1, samples // args.train.batch_size * args.train.max_epochs)
    step = trainer.actor.model.global_steps // updates + 1
    return scheduled(args.actor.entropy_coef, EntropyBonus.of(args).entropy_steps, step)  # type: ignore[attr-defined]
