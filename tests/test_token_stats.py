"""Statistics of tokens: the papers' numbers, a naive full softmax with autograd's gradients, and what is kept."""

from dataclasses import fields
from math import inf, log, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.rlvr.token_stats import TokenStats, Wanted, from_hidden, from_logits

METRICS = Wanted(entropy=True, mode=True, square_term=True)
EVERYTHING = Wanted(entropy=True, mode=True, square_term=True, entropy_gradient=True, mode_gradient=True)
STATS = [field.name for field in fields(TokenStats)]
VECTOR = (2.0, 1.0, 0.5, -1.0, 0.0)


def naive(logits, tokens, temperature=1.0):
    """Full softmax in float64, differentiated by autograd."""
    log_pi = (logits.double() / temperature).log_softmax(-1)
    pi, sampled = log_pi.exp(), log_pi.gather(-1, tokens[..., None])[..., 0]
    entropy = -torch.special.xlogy(pi, pi).sum(-1)
    top = log_pi.max(-1).values
    square_term = torch.where(pi > 0, pi**2 * (log_pi + entropy[..., None]), 0).sum(-1)
    return TokenStats(sampled, entropy, sampled.exp() >= top.exp() - 1e-6, top, square_term)


def assert_same(stats, other, atol=1e-12, mask=None):
    for name in STATS:
        one, two = getattr(stats, name), getattr(other, name)
        if mask is not None:
            two = torch.where(mask, two, torch.zeros_like(two))
        torch.testing.assert_close(
            one.to(two.dtype), two, rtol=atol, atol=atol, msg=lambda text, name=name: name + text
        )


def some_loss(stats):
    """A number that has every gradient there is, differing from token to token."""
    ramp = torch.arange(1.0, stats.log_probs.numel() + 1).view(stats.log_probs.shape)
    parts = [stats.log_probs, stats.entropy, stats.mode_log_prob]
    return sum(((k + ramp).to(part.dtype) * part).sum() for k, part in enumerate(parts) if part.requires_grad)


def gradient(stats, *inputs):
    return torch.autograd.grad(some_loss(stats), inputs, retain_graph=True)


def batch(seed, *shape, vocabulary=13, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.6
    return logits.to(dtype).requires_grad_(), tokens, mask


def layer(seed, *shape, size=4, vocabulary=13, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((*shape, size), (vocabulary, size))]
    return [tensor.to(dtype).requires_grad_() for tensor in (*tensors, tensors[1][:, 0].clone())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_the_papers(dtype):
    """Entropy, square term and δ of one distribution, and DynaMO's entropy change for each sampled token."""
    stats = from_logits(torch.tensor([VECTOR] * 5, dtype=dtype), torch.arange(5), wanted=METRICS)
    assert stats.entropy.tolist() == pytest.approx([1.206489] * 5, abs=1e-6)
    assert stats.square_term.tolist() == pytest.approx([0.161070] * 5, abs=1e-6)
    assert (1 - stats.mode_log_prob.exp()).tolist() == pytest.approx([0.436979] * 5, abs=1e-6)
    assert stats.is_mode.tolist() == [True, False, False, False, False]
    change = -0.7 * (stats.log_probs.exp() * (stats.log_probs + stats.entropy) - stats.square_term)
    assert change.tolist() == pytest.approx([-0.136352, 0.166097, 0.189075, 0.159212, 0.185712], abs=1e-6)
    assert {getattr(stats, name).dtype for name in STATS if name != "is_mode"} == {dtype}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=2),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    chunk=st.integers(1, 7),
    masked=st.booleans(),
)
def test_a_naive_softmax_says_the_same_with_its_gradients(seed, shape, temperature, chunk, masked):
    logits, tokens, mask = batch(seed, *shape)
    mask = mask if masked else None
    options = {"wanted": EVERYTHING, "temperature": temperature, "mask": mask, "chunk_tokens": chunk}
    stats, expected = from_logits(logits, tokens, **options), naive(logits, tokens, temperature)
    assert_same(stats, expected, mask=mask)
    of_naive = TokenStats(
        *(getattr(expected, name) if mask is None else getattr(expected, name) * mask for name in STATS)
    )
    for one, two in zip(gradient(stats, logits), gradient(of_naive, logits), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=2),
    temperature=st.sampled_from([1.0, 0.6]),
    chunks=st.tuples(st.integers(1, 7), st.integers(1, 15)),
    masked=st.booleans(),
    biased=st.booleans(),
)
def test_hidden_states_give_the_same_as_their_logits(seed, shape, temperature, chunks, masked, biased):
    hidden, weight, bias = layer(seed, *shape)
    inputs = (hidden, weight, bias) if biased else (hidden, weight)
    _, tokens, mask = batch(seed, *shape)
    options = {"wanted": EVERYTHING, "temperature": temperature, "mask": mask if masked else None}
    blocks = {"chunk_tokens": chunks[0], "chunk_vocabulary": chunks[1]}
    stats = from_hidden(hidden, weight, tokens, bias=bias if biased else None, **options, **blocks)
    expected = from_logits(hidden @ weight.T + (bias if biased else 0), tokens, **options)
    assert_same(stats, expected)
    for one, two in zip(gradient(stats, *inputs), gradient(expected, *inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def test_gradients_are_finite_differences():
    logits, tokens, mask = batch(1, 2, 3, vocabulary=5)
    hidden, weight, bias = layer(2, 2, 3, vocabulary=5)
    options = {"wanted": EVERYTHING, "temperature": 0.7, "mask": mask, "chunk_tokens": 2}

    def differentiable(stats):
        return stats.log_probs, stats.entropy, stats.mode_log_prob

    assert mask.any() and not mask.all()
    assert torch.autograd.gradcheck(lambda x: differentiable(from_logits(x, tokens, **options)), logits)
    assert torch.autograd.gradcheck(
        lambda h, w, b: differentiable(from_hidden(h, w, tokens, bias=b, chunk_vocabulary=2, **options)),
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_low_precision_logits_are_calculated_with_in_float32(overwrite):
    """Errors are those of float32, though bfloat16 has three digits; the gradient is rounded once."""
    logits, tokens, mask = batch(3, 4, 6, vocabulary=3000, dtype=torch.bfloat16)
    options = {"wanted": EVERYTHING, "temperature": 0.9, "mask": mask, "chunk_tokens": 5}
    stats = from_logits(logits.clone(), tokens, overwrite=overwrite, **options)
    exact = logits.detach().double().requires_grad_()
    expected = naive(exact, tokens, 0.9)
    assert stats.log_probs.dtype == torch.float32
    assert_same(stats, expected, atol=3e-6, mask=mask)
    (rounded,) = gradient(stats, logits)
    (wanted,) = gradient(from_logits(exact, tokens, **options), exact)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), wanted, rtol=2**-8, atol=1e-6)


def test_low_precision_hidden_states_give_what_the_rounded_logits_give():
    hidden, weight, bias = layer(4, 9, size=8, vocabulary=50, dtype=torch.bfloat16)
    _, tokens, mask = batch(4, 9, vocabulary=50)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    options = {"wanted": EVERYTHING, "mask": mask}
    stats = from_hidden(hidden, weight, tokens, bias=bias, chunk_tokens=4, chunk_vocabulary=7, **options)
    expected = from_logits(logits, tokens, **options)
    assert_same(stats, expected, atol=1e-5)
    for one, two in zip(*(gradient(of, hidden, weight, bias) for of in (stats, expected)), strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02 * two.abs().max().item())


def test_size_of_chunks_does_not_matter():
    logits, tokens, mask = batch(5, 40, vocabulary=300, dtype=torch.float32)
    whole = from_logits(logits, tokens, wanted=EVERYTHING, mask=mask)
    for chunk in (1, 3, 7, 64):
        stats = from_logits(logits, tokens, wanted=EVERYTHING, mask=mask, chunk_tokens=chunk)
        assert_same(stats, whole, atol=1e-6)
        torch.testing.assert_close(gradient(stats, logits)[0], gradient(whole, logits)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blocks", [None, 1, 2])
def test_extreme_logits_stay_finite(dtype, blocks):
    """Large logits of either sign, −inf where nothing was sampled; certain and uniform distributions."""
    rows = [[1e4, -1e4, 0, -inf], [-1e4, -1e4, -1e4, -inf], [-inf, -inf, 5, -inf], [-1e4, 1e4, 1e4, 1e4]]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    tokens, certain, third = torch.tensor([1, 2, 2, 3]), [-2e4, -log(3), 0, -log(3)], [0, log(3), 0, log(3)]
    nothing = [torch.zeros(rows, 1, dtype=dtype, requires_grad=True) for rows in (1, 4)]
    if blocks is None:
        inputs = [logits]
        stats = from_logits(logits, tokens, wanted=EVERYTHING)
    else:  # hidden states and matrix are 0, and the biases the logits
        inputs = [logits, *nothing]
        parts = [
            from_hidden(*nothing, token[None], wanted=EVERYTHING, bias=row, chunk_vocabulary=blocks)
            for row, token in zip(logits, tokens, strict=True)
        ]
        stats = TokenStats(*(torch.cat([getattr(part, name) for part in parts]) for name in STATS))
    assert stats.log_probs.tolist() == pytest.approx(certain, abs=1e-6)
    assert stats.entropy.tolist() == pytest.approx(third, abs=1e-6)
    assert stats.is_mode.tolist() == [False, True, True, True]
    assert stats.square_term.tolist() == pytest.approx([0] * 4, abs=1e-6)
    slopes = gradient(stats, *inputs)
    assert all(one.isfinite().all() for one in slopes)
    assert slopes[0][:3, 3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_masked_positions_are_never_read(bad):
    logits, tokens, mask = batch(6, 3, 5)
    hidden, weight, _ = layer(6, 3, 5)
    tokens = torch.where(mask, tokens, -100)
    for name, clean in (("logits", logits), ("hidden", hidden)):
        dirty = torch.where(mask[..., None], clean.detach(), bad).requires_grad_()
        for given_mask in (mask, mask.float(), mask.long()):
            options = {"wanted": EVERYTHING, "mask": given_mask}
            stats = (
                from_logits(dirty, tokens, **options)
                if name == "logits"
                else from_hidden(dirty, weight, tokens, **options)
            )
            for statistic in STATS:
                assert (getattr(stats, statistic)[~mask] == 0).all()
            (slopes,) = gradient(stats, dirty)
            assert (slopes[~mask] == 0).all() and slopes.isfinite().all() and (slopes[mask] != 0).any()


def test_nothing_counts():
    logits, tokens, mask = batch(7, 2, 3)
    stats = from_logits(logits, tokens, wanted=EVERYTHING, mask=torch.zeros_like(mask))
    assert all((getattr(stats, name) == 0).all() for name in STATS)
    assert (gradient(stats, logits)[0] == 0).all()


def test_only_what_is_wanted_is_computed_and_differentiated():
    logits, tokens, _ = batch(8, 4)
    stats = from_logits(logits, tokens, wanted=Wanted())
    assert [name for name in STATS if getattr(stats, name) is not None] == ["log_probs"]
    stats = from_logits(logits, tokens, wanted=METRICS)
    assert [name for name in STATS if getattr(stats, name).requires_grad] == ["log_probs"]
    stats = from_logits(logits, tokens, wanted=Wanted(mode=True, mode_gradient=True))
    assert stats.mode_log_prob.requires_grad and stats.entropy is None
    with torch.no_grad():
        stats = from_logits(logits, tokens, wanted=EVERYTHING)
    assert not any(getattr(stats, name).requires_grad for name in STATS)
    with pytest.raises(ValueError, match="entropy_gradient is set and entropy is not"):
        Wanted(entropy_gradient=True)


def kept_for_backward(function):
    """Storages that autograd keeps, with their bytes."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stats = function()
    return storages, stats


@pytest.mark.parametrize("wanted", [Wanted(), METRICS, EVERYTHING])
def test_the_backward_keeps_inputs_and_a_few_numbers_a_token(wanted):
    count, vocabulary, size = 24, 5000, 8
    logits, tokens, _ = batch(9, count, vocabulary=vocabulary, dtype=torch.float32)
    hidden, weight, _ = layer(9, count, size=size, vocabulary=vocabulary, dtype=torch.float32)
    few = 2 * 4 + 8 + (4 + 8 if wanted == EVERYTHING else 0)  # peak and total, token, and mean and mode where asked for
    kept, stats = kept_for_backward(lambda: from_logits(logits, tokens, wanted=wanted))
    assert kept.pop(logits.untyped_storage().data_ptr()) and sum(kept.values()) == count * few
    kept, stats = kept_for_backward(lambda: from_hidden(hidden, weight, tokens, wanted=wanted))
    for one in (hidden, weight):
        assert kept.pop(one.untyped_storage().data_ptr())
    assert sum(kept.values()) == count * few and stats.log_probs.requires_grad
    with torch.no_grad():
        assert kept_for_backward(lambda: from_logits(logits, tokens, wanted=wanted))[0] == {}


def test_a_sampled_token_as_probable_as_the_mode_is_the_mode():
    """Of equal ones, of ones within 1e-6 in probability; the gradient of the mode is the sampled token's on a tie."""
    near = log(0.5 - 0.6e-6) - log(0.5)
    rows, tokens = [[1, 1, 0], [1, 1, 0], [0, near, -9], [0, 4 * near, -9]], torch.tensor([0, 1, 1, 1])
    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    stats = from_logits(logits, tokens, wanted=EVERYTHING)
    assert stats.is_mode.tolist() == [True, True, True, False]
    (slopes,) = torch.autograd.grad(stats.mode_log_prob.sum(), logits)
    mode = [0, 1, 0, 0]
    expected = torch.nn.functional.one_hot(torch.tensor(mode), 3) - logits.softmax(-1)
    torch.testing.assert_close(slopes, expected, rtol=0, atol=1e-12)


def test_logits_are_left_alone_unless_they_may_be_overwritten():
    leaf, tokens, mask = batch(10, 3, 4, dtype=torch.float32)
    before = leaf.detach().clone()
    options = {"wanted": EVERYTHING, "temperature": 0.8, "mask": mask, "chunk_tokens": 2}
    (expected,) = gradient(from_logits(leaf, tokens, **options), leaf)
    assert torch.equal(leaf, before)
    logits = leaf * 1
    (slopes,) = gradient(from_logits(logits, tokens, overwrite=True, **options), logits)
    assert torch.equal(slopes, expected)
    assert slopes.data_ptr() == logits.data_ptr() and torch.equal(leaf, before)


def test_overwriting_is_refused_where_values_would_be_lost():
    leaf, tokens, _ = batch(11, 3, 4)
    for logits in (leaf, leaf.view(4, 3, -1), (leaf * 1)[:1].expand(3, 4, -1)):
        with pytest.raises(ValueError, match="overwrite"):
            from_logits(logits, tokens.view(logits.shape[:-1]), wanted=Wanted(), overwrite=True)
    from_logits(leaf.detach(), tokens, wanted=Wanted(), overwrite=True)
    logits = leaf.exp()  # whose own backward reads what it gave
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        from_logits(logits, tokens, wanted=Wanted(), overwrite=True).log_probs.sum().backward()
    logits = leaf * 1
    log_probs = from_logits(logits, tokens, wanted=Wanted(), overwrite=True).log_probs
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize("first", [True, False])
def test_overwriting_beside_another_use_of_the_logits_gives_the_sum_of_gradients_or_an_error(first):
    """Another use runs backward before the later made one: it has read the logits by then, or is refused them."""
    leaf, tokens, _ = batch(12, 6)

    def slopes(other, overwrite):
        logits = leaf * 1
        loss = other(logits) if first else 0
        loss = loss + from_logits(logits, tokens, wanted=Wanted(), overwrite=overwrite).log_probs.sum()
        return torch.autograd.grad(loss if first else loss + other(logits), leaf)[0]

    torch.testing.assert_close(slopes(torch.sum, True), slopes(torch.sum, False))
    if first:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            slopes(lambda logits: logits.square().sum(), True)
    else:
        square = [slopes(lambda logits: logits.square().sum(), overwrite) for overwrite in (True, False)]
        torch.testing.assert_close(*square)


def test_bad_input_is_named():
    logits, tokens, mask = batch(13, 2, 3)
    hidden, weight, bias = layer(13, 2, 3)
    for message, arguments in (
        ("tokens .* do not match", {"tokens": tokens[:1]}),
        ("mask: want the shape", {"mask": mask[:1]}),
        ("temperature: want a number above 0", {"temperature": 0.0}),
        ("tokens: want numbers from 0 to 12", {"tokens": tokens + 13}),
        ("cannot be flattened without a copy", {"logits": logits[:, :-1], "tokens": tokens[:, :-1]}),
    ):
        with pytest.raises(ValueError, match=message):
            from_logits(**({"logits": logits, "tokens": tokens, "wanted": METRICS} | arguments))
    for message, arguments in (
        ("weight: want", {"weight": weight[:, :-1]}),
        ("weight: want", {"weight": weight.float()}),
        ("bias: want", {"bias": bias[:-1]}),
        ("tokens: want numbers from 0 to 12", {"tokens": tokens - 20}),
    ):
        with pytest.raises(ValueError, match=message):
            from_hidden(**({"hidden": hidden, "weight": weight, "tokens": tokens, "wanted": METRICS} | arguments))
