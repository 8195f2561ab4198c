"""ACPO's factors by the numbers, its ablations against one another, and what the clamp does."""

import math

import pytest
import torch
from softmax_reference import ragged, statistics

from openrlhf.rlvr.acpo import VARIANTS, Acpo, acpo, needs
from openrlhf.rlvr.micro_batch import MicroBatch

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.0])


def one_token(delta, ratio, advantage, aligned=True):
    """A token that is the mode with π = 1 − δ, or one of π = .1 beside it."""
    log_prob = math.log(1 - delta) if aligned else math.log(0.1)
    single = [[one] for one in (log_prob, log_prob - math.log(ratio), advantage, 1.0)]
    tensors = (torch.tensor([one], dtype=torch.float64) for one in single)
    mode = torch.tensor([[math.log(1 - delta)]], dtype=torch.float64)
    return MicroBatch(*tensors, is_mode=torch.tensor([[aligned]]), mode_log_prob=mode)


def factor(batch, settings=None):
    """F = C/A."""
    return (acpo(batch, settings or Acpo()).coefficient / batch.advantages).item()


def close(expected):
    return pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("token", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_nothing_has_changed_yet_by_numbers(token, dtype):
    """δ = .436979: the mode and the other tokens weigh 3δ where A > 0; elsewhere 2.904762(1 − δ) and 3(1 − δ)."""
    stats = statistics(LOGITS.to(dtype).view(1, 1, -1), torch.tensor([[token]]))
    assert 1 - stats["mode_log_prob"].exp().item() == close(0.436979)
    old = stats["log_probs"]
    for advantage, of_mode, of_others in ((2.0, 1.310936, 1.310936), (-2.0, 1.635443, 1.689064)):
        batch = MicroBatch(**stats, old_log_probs=old, advantages=torch.tensor([[advantage]]), mask=torch.ones(1, 1))
        assert factor(batch) == close(of_mode if token == 0 else of_others)


@pytest.mark.parametrize(
    ("delta", "ratio", "positive", "negative"),
    [
        (0.05, 0.5, -0.47114, 1.78886),
        (0.05, 1.2, 0.34619, 3.12635),
        (0.3, 0.8, 0.56126, 1.74772),
        (0.3, 2.0, 1.57070, 3.05075),
    ],
)
def test_the_modes_factors_by_numbers(delta, ratio, positive, negative):
    found = [factor(one_token(delta, ratio, advantage)) for advantage in (1.5, -1.5)]
    assert found == pytest.approx([positive, negative], abs=6e-6)


@pytest.mark.parametrize("delta", [1e-6, 0.05, 0.3, 0.7])
@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.0, 1.2, 2.0])
@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (0.8, 1.3)])
def test_the_factors_by_their_formulas(delta, ratio, tau_pos, tau_neg):
    """F⁺ = (2/τ + δ)·r·f' − (1 − δ)·f and F⁻ = (1 − δ)(r·f' + f) for the mode; r·f' times (1 + 2/τ)δ, 3(1 − δ) else."""

    def gate(tau):
        opening = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 / tau * opening, 4 * opening * (1 - opening)

    settings = Acpo(tau_pos=tau_pos, tau_neg=tau_neg)
    (up, up_slope), (down, down_slope) = gate(tau_pos), gate(tau_neg)
    expected = {
        (1.0, True): (2 / tau_pos + delta) * ratio * up_slope - (1 - delta) * up,
        (-1.0, True): (1 - delta) * (ratio * down_slope + down),
        (1.0, False): (1 + 2 / tau_pos) * delta * ratio * up_slope,
        (-1.0, False): 3 * (1 - delta) * ratio * down_slope,
    }
    for (advantage, aligned), value in expected.items():
        assert factor(one_token(delta, ratio, advantage, aligned), settings) == close(value)
    if ratio == 1:
        assert expected[1.0, True] == close((1 + 2 / tau_pos) * delta)
        assert expected[-1.0, True] == close((1 + 2 / tau_neg) * (1 - delta))


@pytest.mark.parametrize(("delta", "below", "above"), [(0.05, 0.8705, 2.461), (0.3, 0.4864, 3.280)])
def test_where_the_sign_turns_round(delta, below, above):
    for ratio, turned in ((below - 2e-4, True), (below + 2e-4, False), (above - 2e-3, False), (above + 2e-3, True)):
        batch = one_token(delta, ratio, 1.0)
        terms = acpo(batch, Acpo())
        assert (factor(batch) < 0) == turned
        assert [one.item() for one in terms.metrics["acpo_reversed"]] == [turned, 1]
        clamped = acpo(batch, Acpo(clamp=True))
        assert clamped.coefficient.item() == (0 if turned else terms.coefficient.item())
        assert clamped.loss.item() == terms.loss.item()
        assert clamped.metrics["acpo_reversed"] == terms.metrics["acpo_reversed"]


def test_the_clamp_takes_the_gradient_of_reversed_tokens_and_of_no_others():
    case = ragged(4, samples=16, places=16)
    gradients = {}
    for clamp in (False, True):
        logits = case.logits.clone().requires_grad_()
        terms = acpo(case.batch(logits), Acpo(clamp=clamp))
        terms.loss.sum().backward()
        gradients[clamp] = logits.grad
    terms = acpo(case.batch(), Acpo())
    turned = case.batch().is_mode & (case.advantages > 0) & (terms.coefficient < 0)
    assert 0 < turned.sum() == terms.metrics["acpo_reversed"][0]
    assert (gradients[True][turned] == 0).all() and torch.equal(gradients[True][~turned], gradients[False][~turned])


def test_the_share_of_reversed_tokens_is_among_the_positive_modes():
    """A token that is not the mode, one that is negative and one that is masked are none of them."""
    log_probs, ratios = torch.full((1, 5), math.log(0.95)), torch.tensor([[0.5, 1.2, 0.5, 0.5, 0.5]])
    batch = MicroBatch(
        log_probs,
        log_probs - ratios.log(),
        torch.tensor([[1.0, 1.0, 1.0, -1.0, 1.0]]),
        torch.tensor([[1, 1, 1, 1, 0]]),
        is_mode=torch.tensor([[True, True, False, True, True]]),
        mode_log_prob=log_probs,
    )
    metrics = {name: [one.item() for one in pair] for name, pair in acpo(batch, Acpo()).metrics.items()}
    assert metrics["acpo_reversed"] == [1, 2] and metrics["acpo_aligned"] == [3, 4]
    assert metrics["acpo_uncertainty"] == pytest.approx([0.2, 4])


def test_what_the_paper_has_for_tau_other_than_one():
    """Offset 2 and weight 3 in place of 2/τ and 1 + 2/τ: another objective, and the same one for τ = 1."""
    for delta, ratio, aligned in ((0.3, 1.0, True), (0.3, 1.3, False)):
        batch = one_token(delta, ratio, 1.0, aligned)
        assert factor(batch, Acpo(scale="paper")) == factor(batch)
    half = {"tau_pos": 0.5}
    assert factor(one_token(0.3, 1.0, 1.0), Acpo(scale="paper", **half)) == close(2.3 - 0.7 * 4)
    assert factor(one_token(0.3, 1.0, 1.0), Acpo(**half)) == close(5 * 0.3)
    assert factor(one_token(0.3, 1.0, 1.0, False), Acpo(scale="paper", **half)) == close(3 * 0.3)
    assert factor(one_token(0.3, 1.0, 1.0, False), Acpo(**half)) == close(5 * 0.3)


@pytest.mark.parametrize(
    ("variant", "of_mode", "of_others"),
    [
        ("full", (3 * 0.3, 2.904762 * 0.7), (3 * 0.3, 3 * 0.7)),
        ("constant", (2, 1), (2, 1)),
        ("positive", (3 * 0.3, 1), (3 * 0.3, 1)),
        ("negative", (1, 2.904762 * 0.7), (1, 2.904762 * 0.7)),
        ("detached", (0.3, 0.7), (0.3, 0.7)),
        ("detached_offset", (2.3, 0.7), (2.3, 0.7)),
    ],
)
def test_the_ablations_at_ratio_one(variant, of_mode, of_others):
    """δ = .3: the branch ablations keep the routing, with the scale that the mode's factor has."""
    settings = Acpo(variant=variant)
    for aligned, expected in ((True, of_mode), (False, of_others)):
        assert [factor(one_token(0.3, 1.0, sign, aligned), settings) for sign in (1.0, -1.0)] == close(list(expected))


@pytest.mark.parametrize(("variant", "positive"), [("entropy", 0.5), ("entropy_offset", 2.5)])
def test_the_share_of_the_greatest_entropy_in_place_of_delta(variant, positive):
    for sign, expected in ((1.0, positive), (-1.0, 0.5)):
        batch = one_token(0.3, 1.0, sign)
        given = {"entropy": torch.tensor([[math.log(4.0)]], dtype=torch.float64), "vocabulary": 16}
        batch = MicroBatch(**{**vars(batch), **given})
        assert factor(batch, Acpo(variant=variant)) == close(expected)
    with pytest.raises(ValueError, match="size of the vocabulary"):
        acpo(MicroBatch(**{**vars(batch), "vocabulary": None}), Acpo(variant=variant))


def test_no_two_ablations_have_the_same_gradient():
    case = ragged(1, samples=8, places=8)
    gradients = {}
    for variant in VARIANTS:
        logits = case.logits.clone().requires_grad_()
        acpo(case.batch(logits), Acpo(variant=variant)).loss.sum().backward()
        gradients[variant] = logits.grad
    for one in VARIANTS:
        for other in VARIANTS[VARIANTS.index(one) + 1 :]:
            assert not torch.allclose(gradients[one], gradients[other], rtol=1e-3), (one, other)


def test_only_unrouted_differentiates_a_mode_that_was_not_sampled():
    case = ragged(2)
    for variant in VARIANTS:
        mode = case.batch().mode_log_prob.detach().requires_grad_()
        batch = case.batch(case.logits.clone().requires_grad_(), mode_log_prob=mode)
        terms = acpo(batch, Acpo(variant=variant))
        (slope,) = torch.autograd.grad(terms.loss.sum(), mode, allow_unused=True)
        assert (slope is not None) == (variant == "unrouted")
        if slope is not None:
            assert (slope[batch.is_mode] == 0).all()


def test_each_variant_says_what_it_needs():
    assert needs(Acpo()) == {"is_mode", "mode_log_prob"}
    assert needs(Acpo(variant="entropy_offset")) == {"is_mode", "mode_log_prob", "entropy"}
    with pytest.raises(ValueError, match=r"MicroBatch\.is_mode"):
        acpo(MicroBatch(*[torch.zeros(1, 1)] * 3, torch.ones(1, 1)), Acpo())
