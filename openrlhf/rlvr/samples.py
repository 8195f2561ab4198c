"""What travels with every sample from its dispatch to its loss: whose it is, and that it is still the same tokens."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Group:
    """One draw of a prompt, whose samples are compared with one another.

    Args:
        draw: number of the draw in the run; the group's id.
        prompt_id: the prompt's identity over the run, under which its statistics are kept.
        source: the prompt's ``datasource``.
        label: what its samples are verified against.
        batch: number of the training batch within the episode.
        count: samples given to it.
        weight: what the prompt weighed in the allocation; None without enough history.
        seen: samples of the prompt before this draw, decayed.
        right: those of them that were right.
    """

    draw: int
    prompt_id: str
    source: str
    label: Any = field(hash=False)  # may be a list
    batch: int
    count: int
    weight: float | None
    seen: float
    right: float


@dataclass(frozen=True)
class Sample:
    """One sample of a group.

    Args:
        group: whose sample it is.
        number: of the sample within the group; with the draw it gives the sample's seed.
        checksum: of its tokens, prompt and response.
        correct: the verdict; None where nothing verified it.
    """

    group: Group
    number: int
    checksum: int
    correct: bool | None


def checksum(tokens: torch.Tensor) -> int:
    """CRC-32 of token ids, any shape."""
    return zlib.crc32(tokens.detach().cpu().to(torch.int64).numpy().tobytes())
