"""Samples for training batches whose prompts get different numbers of them, within an exact budget."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from openrlhf.repeat.samples import Draw, OrderedSamplesGenerator
from openrlhf.rlvr.allocation import Allocation, share
from openrlhf.rlvr.prompts import RaggedPromptSource
from openrlhf.rlvr.ragged import is_ragged
from openrlhf.rlvr.records import JsonLines
from openrlhf.rlvr.samples import Group, Sample, checksum
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call


@dataclass(frozen=True)
class GroupDraw(Draw):
    """A draw, the group that its samples form, and the number of the filtered draw that it replaces, if any."""

    group: Group
    replaces: int | None


@dataclass(frozen=True)
class Outcome:
    """What came back of a draw, and whether it goes into a training batch."""

    draw: GroupDraw
    samples: list[Experience]
    accepted: bool


class RaggedSamplesGenerator(OrderedSamplesGenerator):
    """Gives each training batch N prompts and exactly N times ``--rollout.n_samples_per_prompt`` samples.

    A prompt's number of samples is decided when it is drawn, from the verdicts up to then; the prompt that replaces a
    filtered one inherits its number. Fewer samples come only where the prompts of an episode run out.
    """

    prompts_dataloader: RaggedPromptSource

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._allocation: Allocation = Allocation.of(self.args)  # type: ignore[attr-defined]
        self._average: int = self.args.rollout.n_samples_per_prompt
        self._bounds = self._allocation.bounds(self._average)
        self._records = JsonLines(self.args, "draws.jsonl")
        self._prompts: Iterator[Any] | None = None
        self._settings_told = False

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """The samples of one training batch, by draw.

        Returns:
            The samples, the percentage of this call's groups that passed dynamic filtering (None without), the number
            of prompts drawn, and whether the episode has ended.
        """
        source = self.prompts_dataloader
        if self._prompts is None:
            self._begin(source)
        assert self._prompts is not None
        size: int = self.args.rollout.batch_size
        batch = min(source.waiting, default=source.planned // size)
        outcomes: list[Outcome] = []
        exhausted = False
        if source.planned < (batch + 1) * size:
            outcomes, exhausted = self._generate(self._prompts, **generate_kwargs)
            batch = min(source.waiting, default=batch)
        samples = source.waiting.pop(batch, [])
        if exhausted := exhausted and not source.waiting:
            self._prompts, source.planned = None, 0
        filtering = self.args.algo.dynamic_filtering_enable and outcomes
        passed = 100 * sum(one.accepted for one in outcomes) / len(outcomes) if filtering else None
        return samples, passed, len(outcomes), exhausted

    def _begin(self, source: RaggedPromptSource) -> None:
        """Start an episode, or go on with the one of a checkpoint; the first time, say under which settings."""
        if not self._settings_told:
            self._settings_told = True
            low, high = self._bounds
            chosen = {**vars(self._allocation), "min_samples": low, "max_samples": high}
            batch = {"average": self._average, "batch_size": self.args.rollout.batch_size}
            self._records.append([{"kind": "settings", "call": source.calls, **chosen, **batch}])
        self._prompts = iter(source)

    def _generate(self, prompts: Iterator[Any], **generate_kwargs: Any) -> tuple[list[Outcome], bool]:
        """Draw, sample, verify; returns the outcomes by draw, and whether the prompts have run out."""
        source = self.prompts_dataloader
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        wanted = self.args.rollout.vllm_generate_batch_size or self.args.rollout.batch_size
        draws = self._plan(prompts, wanted)
        exhausted = len(draws) < wanted
        outcomes, ran_out = self._collect(prompts, draws, **generate_kwargs)
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        outcomes.sort(key=lambda outcome: outcome.draw.number)
        for outcome in outcomes:
            group = outcome.draw.group
            if outcome.accepted:
                source.waiting.setdefault(group.batch, []).extend(outcome.samples)
            verdicts = [one.samples[0].correct for one in outcome.samples]
            if None not in verdicts:
                source.statistics.update(group.prompt_id, len(verdicts), sum(verdicts))
        self._records.append(_row(source.calls, outcome) for outcome in outcomes)
        source.calls += 1
        source.planned += len(draws)
        return outcomes, exhausted or ran_out

    def _plan(self, prompts: Iterator[Any], wanted: int) -> list[GroupDraw]:
        """Draw prompts and share out the samples of each training batch, or of the part of it that is drawn now."""
        planned, size = self.prompts_dataloader.planned, self.args.rollout.batch_size
        draws: list[GroupDraw] = []
        while len(draws) < wanted:
            batch, filled = divmod(planned + len(draws), size)
            part = self._draw_groups(prompts, min(size - filled, wanted - len(draws)), batch)
            if not part:
                break
            draws += part
        return draws

    def _draw_groups(
        self, prompts: Iterator[Any], wanted: int, batch: int, replaced: GroupDraw | None = None
    ) -> list[GroupDraw]:
        """Up to ``wanted`` draws for one training batch, which share their number times the average; or one in place
        of a filtered draw, with as many samples."""
        source = self.prompts_dataloader
        rows = []
        for row in islice(prompts, wanted):
            rows.append((source.draws - 1, *(column for (column,) in row)))
        ids = [row[-1] for row in rows]
        options = self._allocation
        weights = source.statistics.weights(ids, options.exponent, options.min_history, options.mastery)
        counts = np.full(len(rows), replaced.n_samples if replaced else self._average)
        if options.strategy == "dynamic" and not replaced and rows:
            counts = share(weights, self._average, *self._bounds)
        draws = []
        for (number, origin, text, label, images, prompt_id), weight, count in zip(rows, weights, counts, strict=True):
            seen, right = source.statistics.counts(prompt_id)
            known = None if math.isnan(weight) else float(weight)
            group = Group(number, prompt_id, str(origin), label, batch, int(count), known, seen, right)
            draws.append(
                GroupDraw(number, text, label, images, int(count), group, replaced.number if replaced else None)
            )
        return draws

    def _collect(
        self, prompts: Iterator[Any], draws: list[GroupDraw], **generate_kwargs: Any
    ) -> tuple[list[Outcome], bool]:
        """Outcomes of all draws and of those that replace filtered ones, and whether the prompts ran out meanwhile."""
        outcomes, exhausted = [], False
        pending = self._dispatch(draws, False, **generate_kwargs)
        arrivals = self._arrivals(pending, **generate_kwargs)
        under_way = [draw.number for draw in draws]
        if self._allocation.strategy == "dynamic" and not self.args.train.async_enable:
            # Which prompt inherits whose number of samples must not depend on which engine answers first.
            arrivals = _in_order(arrivals, under_way)
        for draw, samples in arrivals:
            self._identify(draw, samples)
            accepted = not self.args.algo.dynamic_filtering_enable or self._within_range(samples)
            outcomes.append(Outcome(draw, samples, accepted))
            if accepted:
                continue
            replacement = self._draw_groups(prompts, 1, draw.group.batch, draw)
            exhausted = exhausted or not replacement
            under_way += [one.number for one in replacement]
            pending |= self._dispatch(replacement, False, **generate_kwargs)
        return outcomes, exhausted

    def _identify(self, draw: GroupDraw, samples: list[Experience]) -> None:
        """Give the samples of a draw their identities; they carry them to the loss.

        Raises:
            RuntimeError: the engine answered something else than what it was asked, or no reward.
        """
        where = f"draw {draw.number} (prompt {draw.group.prompt_id})"
        if len(samples) != draw.n_samples:
            raise RuntimeError(f"{where}: {len(samples)} samples came back, not the {draw.n_samples} asked for")
        verified = bool(self.args.reward.remote_url or self.args.train.agent_func_path)
        for number, sample in enumerate(samples):
            (label,) = sample.labels
            if label != draw.label and not (label != label and draw.label != draw.label):  # NaN is not itself
                raise RuntimeError(
                    f"{where}: a sample came back with the label {label!r}, not {draw.label!r}; an agent must return "
                    "the label that it was given"
                )
            if verified and sample.rewards is None:
                raise RuntimeError(
                    f"{where}: the reward function gave no reward for a sample; the log says why where it says 'Failed "
                    "to fetch reward'"
                )
            _flatten(sample, where)
            correct = None if sample.scores is None else sample.scores.item() >= self._allocation.correct_score
            sample.samples = [Sample(draw.group, number, checksum(sample.sequences), correct)]


def _flatten(sample: Experience, where: str) -> None:
    """Make reward and score one finite float32 each: servers answer with lists, functions with any dtype."""
    for field, name in (("rewards", "reward"), ("scores", "score")):
        value = getattr(sample, field)
        if value is None:
            continue
        if value.numel() != 1 or not torch.isfinite(value).all():
            raise RuntimeError(f"{where}: the {name} of a sample is {value.tolist()}, not one finite number")
        setattr(sample, field, value.reshape(1).float())
        sample.info[name] = getattr(sample, field).clone()


def _in_order(
    arrivals: Iterator[tuple[GroupDraw, list[Experience]]], under_way: list[int]
) -> Iterator[tuple[GroupDraw, list[Experience]]]:
    """Arrivals by number of draw; ``under_way`` holds the numbers to come, and may grow by higher ones."""
    early: dict[int, tuple[GroupDraw, list[Experience]]] = {}
    while under_way:
        first = min(under_way)
        while first not in early:
            draw, samples = next(arrivals)
            early[draw.number] = (draw, samples)
        under_way.remove(first)
        yield early.pop(first)


def _row(call: int, outcome: Outcome) -> dict[str, Any]:
    """A line of draws.jsonl."""
    group = {name: value for name, value in vars(outcome.draw.group).items() if name != "label"}
    return {
        **{"kind": "draw", "call": call, **group, "replaces": outcome.draw.replaces},
        "scores": [None if one.scores is None else one.scores.item() for one in outcome.samples],
        "correct": sum(one.samples[0].correct or False for one in outcome.samples),
        "accepted": outcome.accepted,
    }


def samples_generator(*args: Any, strategy: Any, **kwargs: Any) -> OrderedSamplesGenerator:
    """The generator that a run's flags ask for."""
    kind = RaggedSamplesGenerator if is_ragged(strategy.args) else OrderedSamplesGenerator
    return kind(*args, strategy=strategy, **kwargs)
