"""How many samples each prompt of a training batch gets: DynaMO's dynamic rollout allocation (arXiv:2602.19208).

A batch of N prompts shares N times ``--rollout.n_samples_per_prompt`` samples exactly. The share of a prompt follows
from the verdicts on its samples so far: most where right and wrong answers are in balance, few where all agree.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from openrlhf.rlvr.flags import flag, settings

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


DYNAMIC_ONLY = ("min_samples", "max_samples", "exponent", "min_history", "mastery", "decay")
"""Options without effect on equal numbers of samples."""


@settings("algo.allocation")
class Allocation:
    """How the samples of a batch are shared among its prompts."""

    strategy: str | None = flag(
        None,
        "samples for each prompt: equally many (uniform), or by what its earlier samples say (dynamic); "
        "unset: upstream's own sampling, without statistics",
        choices=("uniform", "dynamic"),
    )
    min_samples: int | None = flag(None, "fewest samples of a prompt; default: half of rollout.n_samples_per_prompt")
    max_samples: int | None = flag(None, "most samples of a prompt; default: one and a half times the average")
    exponent: float = flag(1.0, "of the variance estimate: 1 as in DynaMO's text, 0.5 as in its theorem (Neyman)")
    min_history: int = flag(4, "samples that a prompt must have had before its share departs from the average")
    mastery: float | None = flag(None, "share of right samples from which a prompt counts as mastered: weight 0")
    decay: float = flag(1.0, "factor on a prompt's earlier counts whenever it is sampled again")
    correct_score: float = flag(1.0, "a sample is right when its score is at least this")
    duplicates: str = flag(
        "refuse", "prompts with one identity in the data: an error, or one statistic", choices=("refuse", "merge")
    )

    def bounds(self, average: int) -> tuple[int, int]:
        """Fewest and most samples of a prompt, of ``average`` samples in the mean."""
        if self.strategy != "dynamic":
            return average, average
        fewest = max(1, average // 2) if self.min_samples is None else self.min_samples
        return fewest, -(-3 * average // 2) if self.max_samples is None else self.max_samples

    def problems(self, flags: dict[str, Any]) -> list[str]:
        average, mean = flags["rollout.n_samples_per_prompt"], "--rollout.n_samples_per_prompt"
        prefix = "--algo.allocation"
        if self.strategy != "dynamic":
            unused = [name for name in DYNAMIC_ONLY if getattr(self, name) != getattr(Allocation, name)]
            return [f"{prefix}.{name}: does nothing without {prefix}.strategy dynamic" for name in unused]
        low, high = self.bounds(average)
        found = [
            (1 <= low <= average, f"{prefix}.min_samples {low}: must lie between 1 and {mean} {average}"),
            (high >= average, f"{prefix}.max_samples {high}: must be {mean} {average} or more"),
            (0 < self.exponent < float("inf"), f"{prefix}.exponent {self.exponent}: must be above 0"),
            (self.min_history >= 2, f"{prefix}.min_history {self.min_history}: must be 2 or more"),
            (
                self.mastery is None or 0 < self.mastery <= 1,
                f"{prefix}.mastery {self.mastery}: must be above 0 and at most 1",
            ),
            (0 < self.decay <= 1, f"{prefix}.decay {self.decay}: must be above 0 and at most 1"),
            (
                not 0 < self.decay < 1 or high / (1 - self.decay) > self.min_history,
                f"{prefix}.min_history {self.min_history}: no prompt ever has as many with {prefix}.decay {self.decay}",
            ),
            (
                not flags["algo.dynamic_filtering_enable"] or low >= 2,
                f"{prefix}.min_samples {low}: dynamic filtering rejects every prompt with one sample; give 2 or more",
            ),
            (
                flags["reward.remote_url"] or flags["train.agent_func_path"],
                f"{prefix}.strategy dynamic: no verdicts; give --reward.remote_url or --train.agent_func_path",
            ),
        ]
        return [fault for sound, fault in found if not sound]


class PromptStatistics:
    """Samples seen and samples right of every prompt, by its id.

    Args:
        decay: factor on a prompt's counts whenever it is sampled again; 1 keeps all that was ever seen.
    """

    def __init__(self, decay: float = 1.0) -> None:
        self.decay = decay
        self._counts: dict[str, tuple[float, float]] = {}

    def update(self, prompt_id: str, seen: int, right: int) -> None:
        """Add the verdicts on a draw's samples, of which ``right`` were right."""
        if not 0 <= right <= seen:
            raise ValueError(f"{right} of {seen} samples cannot be right")
        if seen:
            before = self.counts(prompt_id)
            self._counts[prompt_id] = (self.decay * before[0] + seen, self.decay * before[1] + right)

    def counts(self, prompt_id: str) -> tuple[float, float]:
        """Samples seen and samples right, decayed; zeros for a prompt never sampled."""
        return self._counts.get(prompt_id, (0.0, 0.0))

    def weights(
        self, prompt_ids: Sequence[str], exponent: float = 1.0, min_history: int = 4, mastery: float | None = None
    ) -> Floats:
        """What prompts weigh in an allocation: P^exponent, with P = k(G − k) / (G(G − 1)) for k right of G seen.

        P estimates p(1 − p), the variance of a sample's verdict, without bias (DynaMO, arXiv:2602.19208).

        Args:
            prompt_ids: N ids.
            exponent: 1, or 0.5 for the Neyman allocation of the paper's theorem.
            min_history: samples below which a prompt has no weight yet.
            mastery: share of right samples from which the weight is 0.

        Returns:
            float64, shape (N,); NaN for a prompt with less history.
        """
        seen, right = np.array([self.counts(one) for one in prompt_ids], dtype=np.float64).reshape(-1, 2).T
        known = seen >= max(2, min_history)
        pairs = np.where(known, seen * (seen - 1), 1.0)
        proxy = np.maximum(right * (seen - right) / pairs, 0.0) ** exponent
        if mastery is not None:
            proxy[right / np.maximum(seen, 1.0) >= mastery] = 0.0
        return np.where(known, proxy, np.nan)

    def state_dict(self) -> dict[str, Any]:
        """Ids and counts as plain lists: compact, since it is made at every step."""
        seen, right = zip(*self._counts.values(), strict=True) if self._counts else ((), ())
        return {"ids": list(self._counts), "seen": list(seen), "right": list(right)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = zip(state["ids"], state["seen"], state["right"], strict=True)
        self._counts = {name: (seen, right) for name, seen, right in rows}


def share(weights: Floats, average: int, fewest: int, most: int) -> Integers:
    """Samples of each prompt of a batch: those without a weight (NaN) get the average, the others what is left.

    Args:
        weights: shape (N,), of ``PromptStatistics.weights``.
        average: samples per prompt, so that the budget is N times it; within ``fewest`` and ``most``.

    Returns:
        int64, shape (N,), with sum N·average.
    """
    known = ~np.isnan(weights)
    low, high = np.where(known, fewest, average), np.where(known, most, average)
    return allocate(np.where(known, weights, 0.0), len(weights) * average, low, high)


def allocate(weights: ArrayLike, budget: int, lower: ArrayLike, upper: ArrayLike) -> Integers:
    """Share a budget in proportion to weights, within bounds: clip(μ·w, lower, upper) with the μ that spends it all.

    Rounded down, and the rest by largest remainder, ties to the lower index. Prompts of weight 0 take what nobody else
    can, equally. O(N log N). DynaMO, arXiv:2602.19208; the bounded optimum is a water-filling.

    Args:
        weights: finite, not negative, shape (N,).
        budget: samples in all.
        lower: fewest samples of each prompt: one integer, or shape (N,).
        upper: most samples of each prompt, likewise.

    Returns:
        Samples of each prompt, int64, shape (N,), whose sum is ``budget``.

    Raises:
        ValueError: bad weights or bounds, or a budget that the bounds do not allow.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.ndim != 1 or not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError("weights must be a list of finite numbers, none below 0")
    low, high = (np.asarray(bound) for bound in (lower, upper))
    if any(bound.dtype.kind not in "iu" or bound.shape not in ((), weights.shape) for bound in (low, high)):
        raise ValueError("bounds must be whole numbers: one, or one for each weight")
    low, high = (np.broadcast_to(bound, weights.shape).astype(np.int64) for bound in (low, high))
    if np.any(low < 0) or np.any(low > high):
        raise ValueError("every lower bound must be 0 or more, and at most its upper bound")
    if budget != int(budget) or not low.sum() <= budget <= high.sum():
        raise ValueError(
            f"{len(weights)} prompts within their bounds take {low.sum()} to {high.sum()} samples, not {budget}"
        )
    positive = weights > 0
    counts = np.where(positive, high, low)
    if counts.sum() < budget:  # the prompts of weight 0 take what is left
        rest, equal = budget - high[positive].sum(), np.ones(int((~positive).sum()))
        counts[~positive] = _fill(equal, rest, low[~positive], high[~positive])
    elif positive.any():
        # Scaled, so that no bound overflows when divided by the smallest weight.
        scaled = np.maximum(weights[positive] / weights.max(), 1e-300)
        counts[positive] = _fill(scaled, budget - low[~positive].sum(), low[positive], high[positive])
    return counts


def _fill(weights: Floats, budget: int, low: Integers, high: Integers) -> Integers:
    """The same for positive weights."""
    # What clip(μ·w, low, high) spends in all grows with μ, linearly between the corners where a prompt enters or leaves
    # its bounds: find the last corner that does not overspend.
    starts, ends = low / weights, high / weights
    corners = np.unique(np.concatenate([starts, ends]))
    place = bisect_right(corners, budget + 1e-9, key=lambda level: np.clip(level * weights, low, high).sum())
    corner = corners[max(0, place - 1)]
    free = (starts <= corner) & (ends > corner)
    shares = np.where(ends <= corner, high, low).astype(np.float64)
    if free.any():
        level = (budget - shares[~free].sum()) / weights[free].sum()
        shares[free] = np.clip(level * weights, low, high)[free]
    shares = np.round(shares, 9)  # whole numbers are whole, and equal remainders equal, up to this
    counts = np.floor(shares).astype(np.int64)
    missing = int(budget - counts.sum())
    by_remainder = np.lexsort((np.arange(len(counts)), -np.round(shares - counts, 9), counts >= high))
    counts[by_remainder[:missing]] += 1
    return counts
