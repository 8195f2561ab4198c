"""Statistics of tokens under the current policy, in one pass over the logits and without a copy of the vocabulary.

For a position with probabilities π over the whole vocabulary, and the token y sampled there:

    log-probability  log π(y)
    entropy          H = −Σ_v π_v log π_v, in nats
    mode             whether y is the mode, and log max_v π_v
    square term      Σ_v π_v² Λ_v with Λ = log π + H, which centres πΛ in DynaMO's entropy change (arXiv:2602.19208)

They follow from sums over a few logits at a time (``token_sums``). Arithmetic is in float32, from float64 logits in
float64. Log-probability, log-probability of the mode and entropy can be differentiated, by hand-written gradients.

For them the logits (or hidden states and output matrix) and two or three numbers a token are kept, and probabilities
are computed anew: that is one exponential for each logit, where storing them would be a copy of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from openrlhf.rlvr.token_sums import Slopes, Sums, Wanted, within

Rows = slice | torch.Tensor
"""Some positions, as a slice or as indices."""


@dataclass(frozen=True)
class TokenStats:
    """Statistics of positions, each of the shape of the tokens, 0 (False) where the mask is; None if not wanted.

    float32 (float64 from float64 inputs), is_mode bool. log_probs has a graph, entropy and mode_log_prob only where
    their gradient is wanted.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    is_mode: torch.Tensor | None = None
    mode_log_prob: torch.Tensor | None = None
    square_term: torch.Tensor | None = None


def from_logits(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    wanted: Wanted,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    overwrite: bool = False,
    chunk_tokens: int | None = None,
) -> TokenStats:
    """Statistics from logits, a few tokens at a time.

    The caller's logits are not changed, unless ``overwrite``: then the backward writes their gradient into their own
    storage, and no second one of that size is ever held. It is for logits that nobody reads after the backward. Where
    another operation kept them for its own backward, autograd itself refuses to go on ("modified by an inplace
    operation"), as it does at a second backward through these statistics.

    Args:
        logits: unscaled, float, shape (N, V) or (B, T, V); a mask in place of a slice, which may need a copy.
        tokens: sampled token of each position, integer, shape (N,) or (B, T); anything where the mask is False.
        wanted: what to compute.
        temperature: logits are divided by it, > 0.
        mask: of the positions that count (nonzero), shape of ``tokens``; the others are never read (they may hold
            NaN), and their gradient is 0.
        overwrite: see above.
        chunk_tokens: tokens at a time; default: by the device's cache and the size of the vocabulary.

    Raises:
        ValueError: on shapes that do not match, a temperature that is not positive, logits whose positions cannot be
            flattened without a copy, and ``overwrite`` where values that outlive the step would be lost.
    """
    _check(logits, tokens, mask, temperature)
    if overwrite and logits.requires_grad:
        base = logits._base if logits._is_view() else logits
        if base is None or base.is_leaf or not logits.is_contiguous():
            raise ValueError(
                "overwrite: the logits must be what a layer made, contiguous; a leaf would lose its values"
            )
    try:
        flat = logits.view(-1, logits.shape[-1])
    except RuntimeError as error:
        raise ValueError("logits: a slice cannot be flattened without a copy; give all of them and a mask") from error
    kept = _kept(mask)
    chosen = _chosen(tokens, kept, logits.shape[-1])
    chunk = chunk_tokens or _chunk(logits, logits.shape[-1])
    stats = _FromLogits.apply(flat, chosen, kept, wanted, temperature, overwrite, chunk)
    return _spread(stats, kept, tokens.shape)


def from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    wanted: Wanted,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    chunk_tokens: int | None = None,
    chunk_vocabulary: int | None = None,
) -> TokenStats:
    """The same statistics from hidden states and output matrix; logits exist a block of tokens × vocabulary at a time.

    Going through the vocabulary in the outer loop of the backward, each part of the matrix is read, and its gradient
    written, once for all tokens. Logits are rounded to the inputs' dtype, as the model's own output layer rounds them.

    Args:
        hidden: last hidden states, float, shape (N, h) or (B, T, h).
        weight: whole output matrix, tied to the embedding or not, shape (V, h), dtype of ``hidden``. It is read again
            in the backward and must still be whole then.
        bias: of the output layer, shape (V,).
        chunk_tokens, chunk_vocabulary: size of a block; default: by the device's cache.

    The rest is as in ``from_logits``.
    """
    _check(hidden, tokens, mask, temperature)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        raise ValueError(f"weight: want (V, {hidden.shape[-1]}) of {hidden.dtype}, not {_of(weight)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != hidden.dtype):
        raise ValueError(f"bias: want ({weight.shape[0]},) of {hidden.dtype}, not {_of(bias)}")
    kept = _kept(mask)
    chosen = _chosen(tokens, kept, len(weight))
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat = flat if kept is None else flat[kept]
    rows = chunk_tokens or (4096 if hidden.is_cuda else 1024)
    columns = chunk_vocabulary or (4096 if hidden.is_cuda else 2048)
    stats = _FromHidden.apply(flat, weight, bias, chosen, wanted, temperature, rows, columns)
    return _spread(stats, kept, tokens.shape)


def _check(inputs: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None, temperature: float) -> None:
    if inputs.shape[:-1] != tokens.shape or not inputs.is_floating_point():
        raise ValueError(f"tokens {_of(tokens)} do not match {_of(inputs)}: want one for each position of floats")
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f"mask: want the shape of the tokens {tuple(tokens.shape)}, not {_of(mask)}")
    if not temperature > 0:
        raise ValueError(f"temperature: want a number above 0, not {temperature}")


def _of(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _chunk(inputs: torch.Tensor, vocabulary: int) -> int:
    """Tokens at a time: on CPU a core's cache holds its share of two buffers, on CUDA a kernel has enough to do."""
    if inputs.is_cuda:
        return max(1, 2**24 // vocabulary)
    return torch.get_num_threads() * max(1, 2**17 // vocabulary)


def _kept(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Positions that count; None: all of them."""
    return None if mask is None else mask.reshape(-1).nonzero().reshape(-1)


def _chosen(tokens: torch.Tensor, kept: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
    """Tokens of the kept positions."""
    chosen = tokens.reshape(-1) if kept is None else tokens.reshape(-1)[kept]
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= vocabulary):
        raise ValueError(f"tokens: want numbers from 0 to {vocabulary - 1} where the mask is set")
    return chosen


def _spread(stats: tuple[Any, ...], kept: torch.Tensor | None, shape: torch.Size) -> TokenStats:
    """Statistics of the kept positions in their places among all of them."""

    def placed(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None or kept is None:
            return None if values is None else values.view(shape)
        return values.new_zeros(shape.numel()).index_copy(0, kept, values).view(shape)

    log_probs, *others = map(placed, stats)
    assert log_probs is not None
    return TokenStats(log_probs, *others)


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _rows(kept: torch.Tensor | None, count: int, chunk: int) -> Iterator[tuple[slice, Rows]]:
    """A chunk of the kept positions, and where they are among all: a slice wherever they follow each other."""
    places = list(range(count)) if kept is None else kept.tolist()
    for part in _slices(len(places), chunk):
        first, last = places[part.start], places[part.stop - 1]
        together = last - first == part.stop - 1 - part.start
        yield part, slice(first, last + 1) if together or kept is None else kept[part]


def _finish(ctx: Any, sums: Sums, sampled: torch.Tensor, tokens: torch.Tensor, *inputs: torch.Tensor | None) -> Any:
    """The statistics; what the backward needs is kept, and those without a gradient are marked."""
    wanted = sums.wanted
    stats = sums.result(sampled, tokens)
    mean = sums.mean() if wanted.entropy_gradient else None
    ctx.save_for_backward(sums.peak, sums.parts[0].clone(), mean, tokens, sums.mode, *inputs)
    ctx.temperature = sums.temperature
    ctx.set_materialize_grads(False)
    differentiated = (True, wanted.entropy_gradient, False, wanted.mode_gradient, False)
    ctx.mark_non_differentiable(
        *(stat for stat, has in zip(stats, differentiated, strict=True) if stat is not None and not has)
    )
    return stats


class _FromLogits(torch.autograd.Function):
    """Statistics of the kept rows of logits (N, V)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        kept: torch.Tensor | None,
        wanted: Wanted,
        temperature: float,
        overwrite: bool,
        chunk: int,
    ) -> Any:
        sums = Sums(wanted, temperature, logits, len(tokens))
        sampled = torch.empty_like(sums.peak)
        buffers = 1 if len(sums.parts) == 1 else 2
        work = sums.peak.new_empty(buffers, min(chunk, len(tokens)), logits.shape[1])
        for part, rows in _rows(kept, len(tokens), chunk):
            some = logits[rows]
            sampled[part] = some.gather(1, tokens[part, None])[:, 0].to(sampled.dtype)
            sums.set(part, some, work[:, : len(some)])
        ctx.overwrite, ctx.chunk = overwrite, chunk
        return _finish(ctx, sums, sampled, tokens, kept, logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        *stats, kept, logits = ctx.saved_tensors
        slopes = Slopes(ctx, gradients, stats)
        result = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        if kept is not None:
            masked = torch.ones(len(logits), dtype=torch.bool, device=logits.device).index_fill_(0, kept, False)
            result.index_fill_(0, masked.nonzero()[:, 0], 0.0)
        count = len(slopes.peak)
        work = slopes.peak.new_empty(2, min(ctx.chunk, count), logits.shape[1])
        for part, rows in _rows(kept, count, ctx.chunk):
            size = part.stop - part.start
            in_place = isinstance(rows, slice) and result.dtype == work.dtype
            slope = result[rows] if in_place else work[0, :size]
            slopes.write(part, logits[rows], 0, slope, work[1, :size])
            if not in_place:
                result[rows] = slope.to(result.dtype)
        return result, *[None] * 6


class _FromHidden(torch.autograd.Function):
    """Statistics of all rows of hidden states (n, h) under an output matrix (V, h), by blocks of rows × columns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        wanted: Wanted,
        temperature: float,
        rows: int,
        columns: int,
    ) -> Any:
        count = len(hidden)
        sums = Sums(wanted, temperature, hidden, count)
        sampled = torch.empty_like(sums.peak)
        work = sums.peak.new_empty(2, min(rows, count), min(columns, len(weight)))
        for columns_here in _slices(len(weight), columns):
            for part in _slices(count, rows):
                logits = linear(hidden[part], weight[columns_here], None if bias is None else bias[columns_here])
                place, inside = within(tokens[part], columns_here.start, logits.shape[1])
                here = logits.gather(1, place).to(sampled.dtype)
                sampled[part] = torch.where(inside, here, sampled[part, None])[:, 0]
                block = Sums(wanted, temperature, hidden, len(logits))
                block.set(slice(None), logits, work[:, : len(logits), : logits.shape[1]])
                sums.add(part, block, columns_here.start)
        ctx.rows, ctx.columns = rows, columns
        return _finish(ctx, sums, sampled, tokens, hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        *stats, hidden, weight, bias = ctx.saved_tensors
        slopes = Slopes(ctx, gradients, stats)
        count, (vocabulary, size) = len(hidden), weight.shape
        by_hidden, by_weight, by_bias = (
            slopes.peak.new_zeros(hidden.shape) if ctx.needs_input_grad[0] else None,
            torch.empty_like(weight) if ctx.needs_input_grad[1] else None,
            torch.empty_like(bias) if ctx.needs_input_grad[2] else None,
        )
        work = slopes.peak.new_empty(2, min(ctx.rows, count), min(ctx.columns, vocabulary))
        for columns in _slices(vocabulary, ctx.columns):
            width = columns.stop - columns.start
            matrix_part, bias_part = slopes.peak.new_zeros(width, size), slopes.peak.new_zeros(width)
            for part in _slices(count, ctx.rows):
                logits = linear(hidden[part], weight[columns], None if bias is None else bias[columns])
                slope = work[0, : len(logits), :width]
                slopes.write(part, logits, columns.start, slope, work[1, : len(logits), :width])
                rounded = slope.to(hidden.dtype)
                if by_hidden is not None:
                    _add_product(by_hidden[part], rounded, weight[columns])
                if by_weight is not None:
                    _add_product(matrix_part, rounded.T, hidden[part])
                if by_bias is not None:
                    bias_part += slope.sum(0)
            if by_weight is not None:
                by_weight[columns] = matrix_part.to(weight.dtype)
            if by_bias is not None:
                by_bias[columns] = bias_part.to(weight.dtype)
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return by_hidden, by_weight, by_bias, *[None] * 5


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product to a sum that may be kept more accurately than its factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
