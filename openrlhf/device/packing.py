"""Packing of padded batches in plain torch, with the names and results of flash-attn's ``bert_padding``.

Shapes: B sequences padded to S, N unpadded tokens in all.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of ``values`` (B*S, ...) at ``indices`` (N,), differentiable; returns (N, ...)."""
    return values[indices]


def unpad_input(
    hidden: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Drop the padding of ``hidden`` (B, S, ...) where ``attention_mask`` (B, S) is 0.

    Returns:
        The tokens (N, ...), their indices in the flattened batch (N,), the cumulative lengths (B + 1,) int32, the
        greatest length, and the lengths (B,) int32.
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cumulative = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, cumulative, int(lengths.max()), lengths


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of unpad_input: (N, ...) to (B, S, ...), zeros at the padding, differentiable."""
    padded = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    return padded.index_copy(0, indices, hidden).unflatten(0, (batch, seqlen))


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Ring attention gathers along the sequence; it needs flash-attn's kernels, hence a GPU."""
    raise NotImplementedError("--ds.ring_attn_size > 1 needs flash-attn and a GPU; set it to 1 on CPU")
