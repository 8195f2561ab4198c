"""Splitting ragged batches over ranks and micro-batches: nothing dropped, no rank without data, no cap exceeded."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.device import accelerator
from openrlhf.rlvr.ragged import is_ragged
from openrlhf.rlvr.samples import checksum
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

Partition = list[list[int]]
"""Indices of the samples of each micro-batch."""


def with_fillers(samples: Sequence[Experience], multiple: int) -> list[Experience]:
    """The samples and as many fillers as make their number a multiple.

    All ranks then take the same number of steps. A filler is two tokens without an action: it passes through model and
    loss, so that it takes part in every collective, with weight zero in sums and normalisers.
    """
    missing = -len(samples) % multiple
    if not missing:
        return list(samples)
    filler = copy.copy(min(samples, key=lambda one: one.sequences.shape[-1]))
    for name, value in vars(filler).items():
        if isinstance(value, torch.Tensor) and Experience.is_step_tensor_field(name):
            setattr(filler, name, value[:, : 2 if name in ("sequences", "attention_mask") else 1])
    filler.action_mask = torch.zeros_like(filler.action_mask)
    filler.response_length = torch.zeros_like(filler.response_length)
    filler.total_length = torch.full_like(filler.total_length, 2)
    filler.images = filler.mm_train_inputs = [None]
    filler.samples = [None]
    return [*samples, *(copy.copy(filler) for _ in range(missing))]


def micro_batches(lengths: Sequence[int], cap: int, multiple: int = 1) -> Partition:
    """Split samples into few micro-batches of about equal length, none longer than a cap.

    Args:
        lengths: tokens of each sample.
        cap: most tokens of a micro-batch.
        multiple: their number is a multiple of this; there must be as many samples for it.

    Raises:
        ValueError: a sample is longer than the cap.
    """
    lengths = list(lengths)
    if max(lengths) > cap:
        raise ValueError(
            f"a sample of {max(lengths)} tokens exceeds the {cap} that a rank takes at once: raise "
            "--train.max_tokens_per_gpu and --rollout.max_tokens_per_gpu, or lower --data.max_len"
        )
    count = _round_up(get_minimum_num_micro_batch_size(lengths, cap, 1, 1), multiple)
    while (parts := _balanced(lengths, count, cap)) is None:  # balancing by length alone can overfill one
        count = min(count + multiple, len(lengths))
    return parts


def cut_to(parts: Partition, lengths: Sequence[int], cap: int, count: int) -> Partition:
    """As many micro-batches as another rank needs more: balanced anew, or with the largest ones cut in two."""
    if len(parts) == count:
        return parts
    if balanced := _balanced(lengths, count, cap):
        return balanced
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda place: len(parts[place]))
        whole = parts[largest]
        parts[largest : largest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return parts


def _balanced(lengths: Sequence[int], count: int, cap: int) -> Partition | None:
    parts: Partition = get_seqlen_balanced_partitions(list(lengths), count, False)
    return parts if all(sum(lengths[one] for one in part) <= cap for part in parts) else None


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


class RaggedReplayBuffer(NaiveReplayBuffer):
    """Upstream's buffer, which checks that samples are still those that were generated, and keeps to the token cap."""

    @torch.no_grad()
    def append(self, experience: Experience) -> None:
        before = len(self.items)
        super().append(experience)
        for item in self.items[before:]:
            (sample,) = item.samples
            if sample is not None and checksum(item.sequences) != sample.checksum:
                raise RuntimeError(
                    f"sample {sample.number} of draw {sample.group.draw} (prompt {sample.group.prompt_id}) reached the "
                    "update with other tokens than it was generated with"
                )

    def setup_dynamic_batch(self, strategy: Any) -> None:
        """Plan the micro-batches of all optimizer steps; each rank has equally many samples and micro-batches."""
        args = strategy.args
        group = strategy.ds_device_mesh["dp"].get_group()
        cap = args.train.max_tokens_per_gpu * args.ds.ring_attn_size * args.ds.tensor_parallel_size
        lengths = [int(item.total_length) for item in self.items]
        size = args.train.batch_size // dist.get_world_size(group=group)
        starts = range(0, len(lengths), size)
        planned = [micro_batches(lengths[start : start + size], cap) for start in starts]
        counts = _reduced([len(parts) for parts in planned], dist.ReduceOp.MAX, group)
        planned = [
            [[start + one for one in part] for part in cut_to(parts, lengths[start : start + size], cap, int(count))]
            for start, parts, count in zip(starts, planned, counts, strict=True)
        ]
        masks = [int(item.action_mask.sum()) for item in self.items]
        tokens = _reduced([sum(masks[start : start + size]) for start in starts], dist.ReduceOp.SUM, group)
        nonempty = [sum(mask > 0 for mask in masks[start : start + size]) for start in starts]
        samples = _reduced(nonempty, dist.ReduceOp.SUM, group)
        self.sample_batch_size = 1
        self.dynamic_indices = [part for parts in planned for part in parts]
        self.dynamic_sample_loss_scale = [len(part) / sum(map(len, parts)) for parts in planned for part in parts]
        # A step without a token to learn from has loss zero, not zero over zero.
        self.dynamic_batch_num_tokens = [max(1.0, n) for n, parts in zip(tokens, planned, strict=True) for _ in parts]
        self.dynamic_global_batch_size = [max(1.0, n) for n, parts in zip(samples, planned, strict=True) for _ in parts]
        self.dynamic_optimizer_step = [int(part is parts[-1]) for parts in planned for part in parts]


def _reduced(values: Sequence[int], operation: Any, group: Any) -> list[float]:
    """Values of all ranks reduced, place by place; exact for whole numbers below 2^53."""
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.current_device())
    dist.all_reduce(tensor, op=operation, group=group)
    return list(tensor.tolist())


def replay_buffer(args: Any, *buffer_args: Any) -> NaiveReplayBuffer:
    """The buffer that a run's flags ask for."""
    return (RaggedReplayBuffer if is_ragged(args) else NaiveReplayBuffer)(*buffer_args)
