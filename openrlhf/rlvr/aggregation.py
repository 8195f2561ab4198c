"""From the losses of tokens to one number, with the normalisers of a whole optimizer step."""

import torch

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "token-mean",
    *,
    batch_num_tokens: float | torch.Tensor,
    global_batch_size: float | torch.Tensor,
    dp_size: int = 1,
    max_length: int | None = None,
) -> torch.Tensor:
    """The contribution of a micro-batch to the loss of its optimizer step; those of all micro-batches add up to it.

    ``token-mean``: Σ loss over the step's tokens (DAPO, arXiv:2503.14476). ``seq-mean-token-mean``: the mean over
    samples of the mean over each one's own tokens (GRPO, arXiv:2402.03300). ``seq-mean-token-sum-norm``: the mean over
    samples of the sum over tokens divided by a length that is the same for all (Dr. GRPO, arXiv:2503.20783).

    Args:
        loss: of tokens, shape (B, T).
        mask: bool or number, which of them count, shape (B, T).
        mode: one of MODES.
        batch_num_tokens: tokens that count in the optimizer step, on all ranks.
        global_batch_size: samples with such a token in the optimizer step, on all ranks.
        dp_size: data-parallel ranks, over which gradients are averaged afterwards.
        max_length: Dr. GRPO's fixed length in tokens.

    Returns:
        A scalar.

    Raises:
        ValueError: an unknown mode, or no length for Dr. GRPO's.
    """
    counts = mask != 0
    sums = torch.where(counts, loss, 0.0)
    if mode == "token-mean":
        return sums.sum() / batch_num_tokens * dp_size
    per_sample = sums.sum(dim=-1)
    if mode == "seq-mean-token-mean":
        per_sample = per_sample / counts.sum(dim=-1).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm" and max_length is not None:
        per_sample = per_sample / max_length
    else:
        raise ValueError(f"{mode!r} with max_length {max_length}: expected one of {', '.join(MODES)}, and a length")
    return per_sample.sum() / global_batch_size * dp_size
