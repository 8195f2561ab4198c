"""Samples in the order in which they were asked for, each with a seed of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import ray
from vllm import SamplingParams

from openrlhf.repeat.seeds import derive
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

# Sampling parameters that the trainer's generate arguments name as vLLM does, with upstream's defaults.
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "skip_special_tokens": False}


@dataclass(frozen=True)
class Draw:
    """One prompt, drawn once: what is dispatched together and comes back as one group of samples."""

    number: int
    prompt: str
    label: str
    images: Any
    n_samples: int


D = TypeVar("D", bound=Draw)


class OrderedSamplesGenerator(SamplesGenerator):
    """Upstream's generator, except that nothing depends on which engine answers first.

    Samples come back by draw number; a filtered draw is replaced by the next number; the noise of a sample depends on
    the run's seed, the draw and the sample's number in it, hence not on how many engines there are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outstanding = [0] * len(self.vllm_engines)
        self._tokenizer_ref = ray.put(self.tokenizer)
        self._evaluation_draws = 0

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Samples for the whole evaluation set, under the same seeds at every evaluation (common random numbers)."""
        self._evaluation_draws = 0
        samples: list[Experience] = super().generate_eval_samples(**generate_kwargs)
        return samples

    def _generate_vllm(
        self, dataloader_iter: Iterator[Any], num_prompts: int, dynamic_filtering: bool, **generate_kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        """Samples of the next ``num_prompts`` draws, of fewer where the prompts run out.

        Returns:
            Samples by draw number, the number of draws made, and whether the prompts have run out.
        """
        evaluating = dataloader_iter is getattr(self, "_eval_dataloader_iter", None)
        n_samples = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        draws = self._draw(dataloader_iter, num_prompts, n_samples, evaluating)
        consumed, exhausted = len(draws), len(draws) < num_prompts
        accepted: dict[int, list[Experience]] = {}
        pending = self._dispatch(draws, evaluating, **generate_kwargs)
        for draw, samples in self._arrivals(pending, **generate_kwargs):
            if not dynamic_filtering or self._within_range(samples):
                accepted[draw.number] = samples
                continue
            replacement = self._draw(dataloader_iter, 1, n_samples, evaluating)
            consumed, exhausted = consumed + len(replacement), exhausted or not replacement
            pending |= self._dispatch(replacement, evaluating, **generate_kwargs)
        return [sample for number in sorted(accepted) for sample in accepted[number]], consumed, exhausted

    def _draw(self, prompts: Iterator[Any], count: int, n_samples: int, evaluating: bool) -> list[Draw]:
        draws = []
        for _, texts, labels, images in islice(prompts, count):
            # Upstream's loaders have batches of one prompt.
            ((text, label, image),) = zip(texts, labels, images, strict=True)
            if evaluating:
                number, self._evaluation_draws = self._evaluation_draws, self._evaluation_draws + 1
            else:
                number = self.prompts_dataloader.draws - 1
            draws.append(Draw(number, text, label, image, n_samples))
        return draws

    def _dispatch(
        self, draws: Sequence[D], evaluating: bool, **generate_kwargs: Any
    ) -> dict[ray.ObjectRef, tuple[D, int]]:
        """Send draws to the engines with the least work; returns draw and engine by reference."""
        refs = {}
        for draw in draws:
            engine = min(range(len(self.vllm_engines)), key=self._outstanding.__getitem__)
            self._outstanding[engine] += draw.n_samples
            ref = self.vllm_engines[engine].generate_responses.remote(
                prompt=draw.prompt,
                label=draw.label,
                sampling_params=self._sampling_params(draw, evaluating, **generate_kwargs),
                max_length=generate_kwargs.get("max_len", 2048),
                hf_tokenizer=self._tokenizer_ref,
                num_samples=draw.n_samples,
                images=draw.images,
            )
            refs[ref] = (draw, engine)
        return refs

    def _arrivals(
        self, pending: dict[ray.ObjectRef, tuple[D, int]], **generate_kwargs: Any
    ) -> Iterator[tuple[D, list[Experience]]]:
        """Draws with their samples, as they come back, until nothing is pending; more may be dispatched meanwhile."""
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=10.0)
            for ref in ready:
                draw, engine = pending.pop(ref)
                responses = ray.get(ref)
                self._outstanding[engine] -= draw.n_samples
                yield draw, [self._process_response_into_experience(one, **generate_kwargs) for one in responses]

    def _sampling_params(self, draw: Draw, evaluating: bool, **generate_kwargs: Any) -> SamplingParams:
        values = {name: generate_kwargs.get(name, default) for name, default in _SAMPLING.items()}
        return SamplingParams(
            **values,
            max_tokens=generate_kwargs.get("max_new_tokens"),
            min_tokens=generate_kwargs.get("min_new_tokens", 1),
            # The engine's own log-probabilities serve only the correction of the mismatch between engine and actor.
            logprobs=None if self.args.algo.advantage.is_correction_level == "off" else 1,
            seed=derive(self.args.train.seed, "evaluation" if evaluating else "training", draw.number),
        )

    def _within_range(self, samples: list[Experience]) -> bool:
        """Whether the mean score of a draw lies strictly inside the range of dynamic filtering; unscored draws do."""
        scores = [sample.scores for sample in samples]
        if any(score is None for score in scores):
            return True
        low, high = self.args.algo.dynamic_filtering_range
        return bool(low < sum(score[0].item() for score in scores) / len(scores) < high)
