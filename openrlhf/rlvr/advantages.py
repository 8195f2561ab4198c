"""Advantages of samples over the groups that share a prompt, whatever the groups' sizes.

Groups are told apart by their ids, never by position. Groups of equal size are computed as one matrix, with one row
for each group: where all sizes are equal this is upstream's own arithmetic, bit for bit.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from openrlhf.rlvr.flags import extend_choices, flag, settings

Matrix = torch.Tensor
"""Rewards of groups of one size n, shape (groups, n)."""


@settings("algo.advantage")
class GroupAdvantage:
    """Options of the estimators that compare the samples of a prompt."""

    ddof: int = flag(1, "of group_norm's standard deviation: 1 as upstream, 0 as a population's", choices=(0, 1))
    group_weight: str = flag(
        "sample",
        "what weighs the same: every sample, or every prompt (advantages times average over own number of samples)",
        choices=("sample", "prompt"),
    )
    drop_zero_variance: bool = flag(
        False, "samples of groups without an advantage leave the loss and its normaliser; else they count as zeros"
    )
    penalties: str = flag(
        "after",
        "with reward_budget, length penalties are added to the advantages (after) or to the rewards (shaped)",
        choices=("after", "shaped"),
    )

    def problems(self, flags: dict[str, Any]) -> list[str]:
        estimator, prefix = flags["algo.advantage.estimator"], "--algo.advantage"
        used = {
            "ddof": ("group_norm",),
            "group_weight": tuple(ESTIMATORS),
            "drop_zero_variance": tuple(ESTIMATORS),
            "penalties": ("reward_budget",),
        }
        found = [
            f"{prefix}.{name}: does nothing with {prefix}.estimator {estimator}; it is for {', '.join(estimators)}"
            for name, estimators in used.items()
            if getattr(self, name) != getattr(GroupAdvantage, name) and estimator not in estimators
        ]
        if estimator == "reward_budget" and flags["rollout.n_samples_per_prompt"] < 2:
            found.append(
                "--rollout.n_samples_per_prompt: reward_budget compares the samples of a prompt; give 2 or more"
            )
        return found


extend_choices("algo.advantage.estimator", "reward_budget")


def _centred(rewards: Matrix, ddof: int) -> Matrix:
    return rewards - rewards.mean(-1, keepdim=True)


def _group_norm(rewards: Matrix, ddof: int) -> Matrix:
    return _centred(rewards, ddof) / (rewards.std(-1, keepdim=True, correction=ddof) + 1e-9)


def _leave_one_out(rewards: Matrix, ddof: int) -> Matrix:
    return rewards - (rewards.sum(-1, keepdim=True) - rewards) / (rewards.shape[-1] - 1)


def _reward_budget(rewards: Matrix, ddof: int) -> Matrix:
    gaps = rewards - rewards.amin(-1, keepdim=True)
    return gaps / gaps.sum(-1, keepdim=True) - 1 / rewards.shape[-1]


ESTIMATORS: dict[str, Callable[[Matrix, int], Matrix]] = {
    "group_norm": _group_norm,
    "dr_grpo": _centred,
    "reinforce_baseline": _centred,
    "rloo": _leave_one_out,
    "reward_budget": _reward_budget,
}
"""Advantage of each sample from the rewards of its group (all of them different groups of one size, 2 or more)."""


def group_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    estimator: str,
    *,
    shaped: torch.Tensor | None = None,
    penalties: str = "after",
    ddof: int = 1,
    group_weight: str = "sample",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advantages from verified rewards, by group.

    group_norm is GRPO's, (R − mean)/std (arXiv:2402.03300), dr_grpo Dr. GRPO's (arXiv:2503.20783), rloo leaves one out
    (arXiv:2402.14740), reward_budget shares a fixed reward among the gaps to the worst sample (arXiv:2611.05942):
    g/Σg − 1/n with g = R − min R. A group of one, and a group whose rewards are all equal, has advantage 0 exactly.

    Args:
        rewards: verified rewards, finite, float, shape (S,).
        groups: integer id of each sample's group, shape (S,), in any order.
        estimator: a key of ESTIMATORS.
        shaped: rewards with length penalties, shape (S,); default: ``rewards``.
        penalties: reward_budget adds what ``shaped`` differs by to its advantages (``after``), or takes the gaps of
            ``shaped``. The others always compare ``shaped``.
        ddof: delta degrees of freedom of group_norm's standard deviation.
        group_weight: ``sample``, or ``prompt``: advantages times the average group size over the group's own.
        valid: bool, shape (S,); samples without a response (False) are in no group and have advantage 0.

    Returns:
        Advantages with the dtype of ``rewards``, shape (S,).

    Raises:
        ValueError: a reward that is not finite.
    """
    shaped = rewards if shaped is None else shaped
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    unusable = ~torch.isfinite(rewards + shaped) & valid
    if unusable.any():
        raise ValueError(f"the rewards of these groups are not finite: {sorted(set(groups[unusable].tolist()))}")
    after = estimator == "reward_budget" and penalties == "after"
    compared, added = (rewards, shaped - rewards) if after else (shaped, None)

    def of_matrix(matrix: Matrix) -> Matrix:
        if matrix.shape[-1] == 1:
            return torch.zeros_like(matrix)
        return torch.where(_differ(matrix), ESTIMATORS[estimator](matrix, ddof), 0.0)

    advantages = per_group(compared, groups, of_matrix, valid)
    if added is not None:
        advantages = torch.where(valid, advantages + added, 0.0)
    if group_weight == "prompt":
        average = int(valid.sum()) / max(1, len(groups[valid].unique()))
        advantages = per_group(advantages, groups, lambda matrix: matrix * (average / matrix.shape[-1]), valid)
    return advantages


def differing(values: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Whether a sample's group holds two different values; bool, shape (S,)."""
    return per_group(values, groups, lambda matrix: _differ(matrix).expand_as(matrix).to(matrix.dtype), valid) > 0


def _differ(matrix: Matrix) -> torch.Tensor:
    # Equality decides, not a small deviation: in float32 the mean of eight times 0.1 is not 0.1.
    return matrix.amax(-1, keepdim=True) != matrix.amin(-1, keepdim=True)


def per_group(
    values: torch.Tensor,
    groups: torch.Tensor,
    function: Callable[[Matrix], Matrix],
    valid: torch.Tensor,
) -> torch.Tensor:
    """Apply a function to the values of groups of equal size, as matrices with one row for each group.

    Args:
        values: shape (S,).
        groups: integer ids, shape (S,).
        function: from shape (groups, n) to the same shape, row by row.
        valid: bool, shape (S,); the others are in no group.

    Returns:
        Results at the places of their values, 0 where there is none; shape (S,).
    """
    results = torch.zeros_like(values)
    for index in _indices_by_size(groups, valid):
        results[index] = function(values[index])
    return results


def _indices_by_size(groups: torch.Tensor, valid: torch.Tensor) -> Iterator[torch.Tensor]:
    """Places of the samples of all groups of one size, shape (groups, size), for each size."""
    places = valid.nonzero().squeeze(-1)
    _, group, sizes = groups[places].unique(return_inverse=True, return_counts=True)
    places = places[group.argsort(stable=True)]
    starts = sizes.cumsum(0) - sizes
    for size in sizes.unique():
        yield places[starts[sizes == size].unsqueeze(-1) + torch.arange(int(size), device=places.device)]
