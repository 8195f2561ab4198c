"""Choosing tokens of a whole optimizer step: the same ones, however they are spread over micro-batches and ranks.

The values of all tokens are brought together in the order of the tokens' keys, every rank decides alone from the same
table, and equal values are told apart by key.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.rlvr.micro_batch import MicroBatch

Threshold = tuple[torch.Tensor, torch.Tensor]
"""The least value that is chosen, and the greatest key that is chosen among those that have it; scalars."""


def table(
    batches: Sequence[MicroBatch], columns: Callable[[MicroBatch], Sequence[torch.Tensor]], group: Any = None
) -> list[torch.Tensor]:
    """Keys and values of all response tokens of a step, in the order of their keys.

    Args:
        batches: the micro-batches of this rank.
        columns: gives tensors of values, shape (B, T) each.
        group: process group of the ranks that share the step; None where there is but one.

    Returns:
        int64 keys, then the columns, shape (N,) each, the same on every rank.
    """
    parts = [[one[batch.mask] for one in (batch.keys, *columns(batch))] for batch in batches]
    whole = [gathered(torch.cat(column).detach(), group) for column in zip(*parts, strict=True)]
    order = whole[0].argsort(stable=True)
    return [column[order] for column in whole]


def gathered(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Values of all ranks, rank after rank, of different numbers on each; shape (N,)."""
    if group is None:
        return values
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group=group))]
    dist.all_gather(counts, count, group=group)
    sizes = [int(one) for one in counts]
    padded = values.new_zeros(max(sizes))
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def greatest(values: torch.Tensor, keys: torch.Tensor, count: int) -> Threshold:
    """What the ``count`` greatest values have in common, of equal ones those with the lower keys.

    Args:
        values: shape (N,), without NaN.
        keys: int64, all different, shape (N,).
        count: 1 to N.
    """
    least = values.topk(count).values[-1]
    ties = keys[values == least].sort().values
    return least, ties[count - 1 - (values > least).sum()]


def reached(values: torch.Tensor, keys: torch.Tensor, threshold: Threshold) -> torch.Tensor:
    """Which tokens a threshold chooses; bool, any shape."""
    least, last = threshold
    return (values > least) | ((values == least) & (keys <= last))


def scattered(keys: torch.Tensor, seed: int) -> torch.Tensor:
    """A pseudo-random number for each key, the same everywhere (splitmix64); int64, any shape."""
    mixed = keys + _signed((seed + 1) * 0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ _shifted(mixed, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right without copying the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
