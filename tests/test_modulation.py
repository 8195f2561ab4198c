"""DynaMO's modulation: the paper's numbers, the entropy change of real logit steps, and extremes that nothing moves."""

import math
from dataclasses import replace

import pytest
import torch
from softmax_reference import ragged, statistics

from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.modulation import (
    Modulation,
    collect,
    compensation,
    entropy_change,
    merge,
    modulate,
    stabilisation,
)
from openrlhf.rlvr.policy_losses import LOSSES
from openrlhf.rlvr.ppo import Clip, ppo
from openrlhf.rlvr.sapo import Sapo

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.0], dtype=torch.float64)


def toy(advantage=1.0):
    """Four tokens of one sequence, the advantage 1."""
    pi, old = torch.tensor([[0.9, 0.5, 0.2, 0.99]]), torch.tensor([[0.85, 0.55, 0.25, 0.99]])
    return MicroBatch(
        pi.log(),
        old.log(),
        torch.full_like(pi, advantage),
        torch.ones_like(pi),
        entropy=torch.tensor([[0.4, 0.9, 1.6, 0.05]]),
    )


def close(expected):
    return pytest.approx(expected, abs=1e-6)


def row(tensor):
    return tensor[0].tolist()


def test_the_entropy_change_by_numbers():
    """ξ = .7 on logits (2, 1, .5, −1, 0), for every token that could have been sampled."""
    tokens = torch.arange(5).view(1, 5)
    logits = LOGITS.expand(1, 5, 5)
    stats = statistics(logits, tokens)
    assert row(stats["entropy"]) == close([1.206489] * 5) and row(stats["square_term"]) == close([0.161070] * 5)
    batch = MicroBatch(**stats, old_log_probs=stats["log_probs"], advantages=torch.ones(1, 5), mask=torch.ones(1, 5))
    found = entropy_change(batch, torch.full((1, 5), 0.7, dtype=torch.float64))
    assert row(found) == close([0.136352, 0.166097, 0.189075, 0.159212, 0.185712])


@pytest.mark.parametrize("token", range(5))
@pytest.mark.parametrize("coefficient", [0.7, -1.3])
def test_the_entropy_change_is_that_of_a_small_step(token, coefficient):
    stats = statistics(LOGITS.view(1, 1, 5), torch.tensor([[token]]))
    batch = MicroBatch(**stats, old_log_probs=stats["log_probs"], advantages=torch.ones(1, 1), mask=torch.ones(1, 1))
    found = entropy_change(batch, torch.tensor([[coefficient]], dtype=torch.float64)).item()
    step = 1e-6 * coefficient * (torch.nn.functional.one_hot(torch.tensor(token), 5) - LOGITS.softmax(-1))
    ahead, behind = (statistics((LOGITS + s * step).view(1, 1, 5), torch.tensor([[0]]))["entropy"] for s in (1, -1))
    assert found == pytest.approx(abs((ahead - behind).item()) / 2e-6, rel=1e-6)


def test_centring():
    batch = toy()
    pi, entropy = batch.log_probs.exp(), batch.entropy
    own = pi * (batch.log_probs + entropy)
    ones = torch.ones_like(pi)
    assert row(entropy_change(batch, ones, "none")) == close(row(own.abs()))
    assert row(entropy_change(batch, ones, "sequence")) == close(row((own - own.mean()).abs()))
    exact = replace(batch, square_term=0.1 * ones)
    assert row(entropy_change(exact, ones, "exact")) == close(row((own - 0.1).abs()))
    # A sequence's own tokens only: neither the masked ones nor another sequence's.
    two = MicroBatch(
        *(one.repeat(2, 1) for one in (batch.log_probs, batch.old_log_probs, batch.advantages)),
        torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]),
        entropy=batch.entropy.repeat(2, 1),
    )
    change = entropy_change(two, torch.ones(2, 4), "sequence")
    middle = own[0, 1:3]
    assert row(change) == close(row((own - own.mean()).abs()))
    assert change[1].tolist() == close([0, *(middle - middle.mean()).abs().tolist(), 0])


def test_the_papers_toy_sequence():
    settings = Modulation(enable=True, centring="sequence")
    batch = toy()
    coefficient = ppo(batch, Clip(0.2, 0.28)).coefficient
    assert row(entropy_change(batch, coefficient, "sequence")) == close([0.173233, 0.001691, 0.082763, 0.062016])
    extremes = collect(batch, coefficient, settings)
    assert row(compensation(batch.entropy, batch.advantages, extremes.entropy_min, extremes.entropy_max)) == close(
        [1.309677, 1.180645, 1, 1.4]
    )
    change = entropy_change(batch, coefficient, "sequence")
    assert row(stabilisation(change, extremes.change_max)) == close([0.602677, 1, 1, 1])
    final, metrics = modulate(batch, coefficient, settings, extremes)
    assert row(final) == close([0.789313, 1.180645, 1, 1.4])
    assert [one.item() for one in metrics["modulation_stabilised"]] == [1, 4]


def test_the_stabilisation_by_numbers():
    greatest = torch.tensor(1.0, dtype=torch.float64)
    shares = torch.tensor([0.85, 0.9, 0.95, 1.0, 0.0], dtype=torch.float64)
    assert stabilisation(shares, greatest).tolist() == close([0.969657, 0.8, 0.630343, 0.602677, 1])
    assert (stabilisation(torch.zeros(3), torch.tensor(0.0), alpha=1.0, gamma=1.0, tau=0.0) == 1).all()
    # The authors' script.
    assert stabilisation(shares, greatest, tau=0.99).tolist()[3] == close(0.6 + 0.4 / (1 + math.exp(0.5)))


def test_compensation_is_for_good_samples_only():
    final, metrics = modulate(toy(-1.0), torch.zeros(1, 4), Modulation(enable=True, terms="compensation"), None)
    assert row(final) == [-1] * 4
    assert [one.item() for one in metrics["modulation_compensation"]] == [0, 0]


def test_a_token_that_the_clip_cuts_off_changes_no_entropy():
    """r = 1.5 with A > 0, r = .5 with A < 0, and A = 0: Ξ = 0; the others are not."""
    log_ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.0]]).log()
    log_probs = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]]).log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 0.0]])
    batch = MicroBatch(log_probs, log_probs - log_ratio, advantages, torch.ones(1, 5), entropy=torch.ones(1, 5))
    change = entropy_change(batch, ppo(batch, Clip(0.2, 0.28)).coefficient, "none")
    assert [one > 0 for one in row(change)] == [False, True, True, False, False]


@pytest.mark.parametrize("scope", ["minibatch", "microbatch", "sequence"])
@pytest.mark.parametrize("centring", ["exact", "sequence", "none"])
def test_strength_zero_and_one_factor_alone(scope, centring):
    case = ragged(6, dtype=torch.float32)
    batch = case.batch().detached()
    coefficient = ppo(batch, Clip()).coefficient

    def final(**options):
        settings = Modulation(enable=True, scope=scope, centring=centring, **options)
        return modulate(batch, coefficient, settings)[0]

    assert torch.equal(final(alpha=0.0), batch.advantages)
    assert torch.equal(modulate(batch, coefficient, Modulation())[0], batch.advantages)
    comp, stab, both = final(terms="compensation"), final(terms="stabilisation"), final()
    torch.testing.assert_close(comp * stab, both * batch.advantages)
    assert torch.equal(final(alpha_stab=0.0), comp) and torch.equal(final(alpha_comp=0.0), stab)
    assert not torch.equal(comp, batch.advantages) and not torch.equal(stab, batch.advantages)
    assert not torch.equal(final(alpha_comp=0.2), both) and not torch.equal(final(tau=0.3), both)
    assert not torch.equal(final(gamma=5.0), both)
    assert (both.sign() == batch.advantages.sign()).all()


def test_scopes_differ():
    batch = ragged(6, samples=6, places=9).batch().detached()
    coefficient = ppo(batch, Clip()).coefficient
    whole, sequence = (
        modulate(batch, coefficient, Modulation(enable=True, scope=scope))[0] for scope in ("microbatch", "sequence")
    )
    assert not torch.allclose(whole, sequence)
    alone = []
    for i in range(6):
        rows = {name: one[i : i + 1] for name, one in vars(batch).items() if isinstance(one, torch.Tensor)}
        settings = Modulation(enable=True, scope="microbatch")
        alone.append(modulate(MicroBatch(**rows), coefficient[i : i + 1], settings)[0])
    torch.testing.assert_close(torch.cat(alone), sequence, rtol=1e-12, atol=0)


def test_the_extremes_of_a_step_are_those_of_all_its_micro_batches():
    settings = Modulation(enable=True)
    batches = [ragged(seed, samples=2).batch().detached() for seed in range(4)]
    batches.append(replace(batches[0], mask=torch.zeros_like(batches[0].mask)))  # a filler has no say
    parts = [collect(one, ppo(one, Clip()).coefficient, settings) for one in batches]
    found = merge(parts)
    entropy = torch.cat([one.entropy[one.mask] for one in batches])
    change = torch.cat([entropy_change(one, ppo(one, Clip()).coefficient)[one.mask] for one in batches])
    assert found.entropy_min == entropy.min() and found.entropy_max == entropy.max()
    assert found.change_max == change.max()


@pytest.mark.parametrize("scope", ["minibatch", "microbatch", "sequence"])
def test_nothing_to_modulate_is_finite(scope):
    """Everything masked, with NaN behind the mask; one token; advantages all zero."""
    settings = Modulation(enable=True, scope=scope)
    nothing = torch.full((2, 3), math.nan)
    given = {"entropy": nothing, "square_term": nothing}
    masked = MicroBatch(nothing, nothing, nothing, torch.zeros(2, 3), **given)
    one = {"entropy": torch.ones(1, 1), "square_term": torch.ones(1, 1)}
    single = MicroBatch(torch.full((1, 1), -0.5), torch.full((1, 1), -0.5), torch.ones(1, 1), torch.ones(1, 1), **one)
    zero = replace(single, advantages=torch.zeros(1, 1))
    for batch, expected in ((masked, 0.0), (zero, 0.0), (single, 0.602677)):
        coefficient = ppo(batch, Clip()).coefficient
        extremes = collect(batch, coefficient, settings)
        final, metrics = modulate(batch, coefficient, settings, extremes if scope == "minibatch" else None)
        assert final.flatten().tolist() == close([expected] * final.numel())
        assert all(torch.isfinite(total) for total, _ in metrics.values())


@pytest.mark.parametrize("name", ["ppo", "sapo", "gpg"])
def test_the_modulation_goes_by_the_losss_own_coefficient(name):
    own = {"ppo": Clip(), "sapo": Sapo(), "gpg": None}[name]
    batch = ragged(8).batch().detached()
    coefficient = LOSSES[name].function(batch, own, None).coefficient
    final, _ = modulate(batch, coefficient, Modulation(enable=True, terms="stabilisation"))
    change = (coefficient * (batch.log_probs.exp() * (batch.log_probs + batch.entropy) - batch.square_term)).abs()
    x = change / (change.max() + 1e-8)
    torch.testing.assert_close(final, batch.advantages * (0.6 + 0.4 / (1 + torch.exp(50 * (x - 0.9)))))


def test_what_the_modulation_needs():
    assert Modulation().needs == frozenset()
    assert Modulation(enable=True).needs == {"entropy", "square_term"}
    assert Modulation(enable=True, centring="sequence").needs == {"entropy"}
    assert Modulation(enable=True, terms="compensation").needs == {"entropy"}
    with pytest.raises(ValueError, match=r"MicroBatch\.square_term"):
        modulate(toy(), torch.ones(1, 4), Modulation(enable=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alpha": -0.1, "terms": "compensation"}, ["alpha_comp"]),
        ({"alpha_stab": 1.1}, ["alpha_stab"]),
        ({"alpha": 0.0}, ["alpha", "enable"]),
        ({"gamma": 0.0}, ["gamma"]),
        ({"tau": 1.5}, ["tau"]),
        ({"alpha_comp": 0.2, "terms": "stabilisation"}, ["alpha_comp", "terms stabilisation"]),
        ({"alpha_stab": 0.2, "terms": "compensation"}, ["alpha_stab", "terms compensation"]),
    ],
)
def test_senseless_settings_are_refused_by_name(options, named):
    flags = {"actor.policy_loss_type": "ppo"}
    (problem,) = Modulation(enable=True, **options).problems(flags)
    assert problem.startswith("--algo.modulation.") and all(name in problem for name in named)
    assert Modulation(**options).problems(flags) == []
    assert Modulation(enable=True).problems(flags) == []


def test_a_ratio_of_sequences_cannot_be_modulated_by_tokens():
    (problem,) = Modulation(enable=True).problems({"actor.policy_loss_type": "gspo"})
    assert "--algo.modulation.enable" in problem and "--actor.policy_loss_type gspo" in problem and "ppo" in problem
