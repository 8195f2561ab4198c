"""Every policy loss against its paper's objective over a plain softmax, upstream's bits, and what would overflow."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from softmax_reference import objective, ragged

from openrlhf.models import PolicyLoss
from openrlhf.rlvr.acpo import VARIANTS, Acpo
from openrlhf.rlvr.aggregation import aggregate
from openrlhf.rlvr.covariance import ClipCov, KlCov
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.policy_losses import LOSSES, PolicyLossOptions, aggregation
from openrlhf.rlvr.ppo import Clip, gspo, ppo
from openrlhf.rlvr.sapo import Sapo, sapo
from openrlhf.rlvr.score import Cispo, cispo, gpg

HIGHER = Clip(0.2, 0.28)
DUAL = Clip(0.2, 0.28, 1.5)

# Name in the registry, our settings, and the reference's options.
METHODS = {
    "ppo": ("ppo", HIGHER, {"high": 0.28}),
    "dual clip": ("ppo", DUAL, {"high": 0.28, "dual": 1.5}),
    "gspo": ("gspo", Clip(0.1, 0.15), {"low": 0.1, "high": 0.15}),
    "sapo": ("sapo", Sapo(), {}),
    "sapo 0.7/1.4": ("sapo", Sapo(0.7, 1.4), {"tau_pos": 0.7, "tau_neg": 1.4}),
    "cispo": ("cispo", Cispo(), {"low": 1.0, "high": 0.28}),
    "cispo 0.2/0.1": ("cispo", Cispo(0.2, 0.1), {"low": 0.2, "high": 0.1}),
    "gpg": ("gpg", None, {}),
    "clip_cov": ("clip_cov", (ClipCov(0.2, -9.0, 9.0), HIGHER), {"high": 0.28}),
    "kl_cov": ("kl_cov", KlCov(0.2, 0.7), {"coef": 0.7}),
    **{f"acpo {name}": ("acpo", Acpo(variant=name), {"variant": name}) for name in VARIANTS},
    "acpo tau": ("acpo", Acpo(tau_pos=0.8, tau_neg=1.3), {"tau_pos": 0.8, "tau_neg": 1.3}),
    "acpo paper": ("acpo", Acpo(tau_pos=0.8, scale="paper"), {"tau_pos": 0.8, "offset": 2, "routed": 3}),
}
SAMPLED_ONLY = [name for name in METHODS if name != "acpo unrouted"]


def chosen_of(name, own, batch):
    """Keys of the tokens that a loss treats apart, and where they are."""
    select = LOSSES[name].select
    if select is None:
        return None, None
    keys = select([batch], own, 0)
    assert 0 < len(keys) < batch.mask.sum()
    return keys, torch.isin(batch.keys, keys) & batch.mask


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_logits_are_those_of_the_papers_objective(method, seed):
    """Autograd of ours, autograd of the objective written over a plain softmax, and its central differences."""
    name, own, options = METHODS[method]
    case = ragged(seed)
    logits, frozen = case.logits.clone().requires_grad_(), case.logits
    batch = case.batch(logits)
    keys, chosen = chosen_of(name, own, batch)
    terms = LOSSES[name].function(batch, own, keys)
    (ours,) = torch.autograd.grad(terms.loss.sum(), logits)
    options = options if chosen is None else {**options, "chosen": chosen}
    value = objective(name, case, logits, frozen, **options)
    (papers,) = torch.autograd.grad(value, logits)
    assert terms.loss.sum().item() == pytest.approx(-value.item(), rel=1e-12)
    torch.testing.assert_close(ours, -papers, rtol=1e-10, atol=1e-12)
    assert (ours[case.mask].abs().sum(-1) > 0).any()

    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        direction = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
        step = 1e-6 * direction
        ahead, behind = (objective(name, case, frozen + sign * step, frozen, **options) for sign in (1, -1))
        assert -(ours * direction).sum().item() == pytest.approx((ahead - behind).item() / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", SAMPLED_ONLY)
def test_the_coefficient_is_what_the_loss_has_before_the_score(method, dtype):
    """C = −∂(Σ loss)/∂log π(y), token by token."""
    name, own, _ = METHODS[method]
    case = ragged(5, samples=8, places=12, dtype=dtype)
    batch = case.batch()
    leaf = batch.log_probs.detach().requires_grad_()
    # The mode that was sampled is differentiated through the sampled token itself.
    batch = replace(batch.detached(), log_probs=leaf)
    terms = LOSSES[name].function(batch, own, chosen_of(name, own, batch)[0])
    (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
    torch.testing.assert_close(terms.coefficient, -gradient, rtol=1e-5, atol=1e-6)
    assert not terms.coefficient.requires_grad and (terms.coefficient[~case.mask] == 0).all()
    assert terms.loss.dtype == terms.coefficient.dtype == dtype
    for total, count in terms.metrics.values():
        assert total.shape == count.shape == () and torch.isfinite(total) and count >= 0


def test_unrouted_acpos_coefficient_leaves_the_modes_part_out():
    """Of a mode that was sampled all is in it; of another token, what passes through log π(y)."""
    case = ragged(5, samples=8, places=12)
    batch = case.batch()
    leaf, mode = batch.log_probs.detach().requires_grad_(), batch.mode_log_prob.detach().requires_grad_()
    terms = LOSSES["acpo"].function(
        replace(batch.detached(), log_probs=leaf, mode_log_prob=mode), Acpo(variant="unrouted"), None
    )
    sampled, unsampled = torch.autograd.grad(terms.loss.sum(), (leaf, mode))
    torch.testing.assert_close(terms.coefficient, -sampled)
    assert (unsampled[case.mask & ~batch.is_mode] != 0).all() and (unsampled[batch.is_mode] == 0).all()


def loss_and_gradient(name, own, log_ratio, advantages, mask, **given):
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    fields = {
        "mode_log_prob": torch.full_like(log_probs, -0.5).detach(),
        "is_mode": torch.tensor([[True] + [False] * (len(log_ratio) - 1)]),
        "entropy": torch.ones(1, len(log_ratio)),
        "samples": torch.tensor([3]),
        "vocabulary": 5,
    }
    batch = MicroBatch(
        log_probs, torch.zeros_like(log_probs), torch.tensor([advantages]), torch.tensor([mask]), **{**fields, **given}
    )
    select = LOSSES[name].select
    terms = LOSSES[name].function(batch, own, select and select([batch.detached()], own, 0))
    terms.loss.sum().backward()
    assert torch.isfinite(terms.coefficient).all()
    assert all(torch.isfinite(total) for total, _ in terms.metrics.values())
    return terms.loss[0].tolist(), log_probs.grad[0].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_t05_what_stands_at_a_masked_token_reaches_neither_loss_nor_gradient(method):
    name, own, _ = METHODS[method]
    own = (ClipCov(), HIGHER) if name == "clip_cov" else own  # it detaches none of one token
    (alone,), (slope,) = loss_and_gradient(name, own, [0.1], [-1.0], [1.0])
    assert slope != 0
    for masked in (900.0, -900.0, math.inf, -math.inf, math.nan):
        hidden = {"entropy": torch.tensor([[1.0, masked]]), "mode_log_prob": torch.tensor([[-0.5, masked]])}
        loss, gradient = loss_and_gradient(name, own, [0.1, masked], [-1.0, masked], [1.0, 0.0], **hidden)
        assert (loss, gradient) == ([alone, 0], [slope, 0])
    if method == "ppo":
        assert alone == pytest.approx(math.exp(0.1)) and slope == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("method", METHODS)
def test_t06_a_huge_ratio_times_advantage_zero_is_zero(method):
    name, own, _ = METHODS[method]
    for log_ratio in (200.0, -200.0, 900.0):
        assert loss_and_gradient(name, own, [log_ratio], [0.0], [1.0]) == ([0], [0])


@pytest.mark.parametrize("method", METHODS)
def test_huge_ratios_are_finite(method):
    name, own, _ = METHODS[method]
    for log_ratio in (900.0, -900.0, 0.0):
        for advantage in (1.0, -1.0):
            (loss,), (gradient,) = loss_and_gradient(name, own, [log_ratio], [advantage], [1.0])
            assert math.isfinite(loss) and math.isfinite(gradient)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_tokens_has_loss_zero_inside_the_graph(method):
    name, own, _ = METHODS[method]
    loss, gradient = loss_and_gradient(name, own, [0.5, 900.0], [1.0, 1.0], [0.0, 0.0])
    assert loss == gradient == [0, 0]


ON_POLICY = ["ppo", "dual clip", "gspo", "sapo", "cispo", "gpg", "clip_cov", "kl_cov"]


@pytest.mark.parametrize("method", ON_POLICY)
def test_where_nothing_has_changed_yet_the_coefficient_is_the_advantage(method):
    """log π = log π_old: r is exactly 1. Clip-Cov and KL-Cov treat some tokens apart all the same."""
    name, own, _ = METHODS[method]
    case = ragged(3, dtype=torch.float32)
    batch = replace(case.batch(), old_log_probs=case.batch().log_probs.detach())
    assert (batch.ratio == 1).all()
    keys, chosen = chosen_of(name, own, batch)
    coefficient = LOSSES[name].function(batch, own, keys).coefficient
    expected = batch.advantages if name != "clip_cov" else torch.where(chosen, 0.0, batch.advantages)
    torch.testing.assert_close(coefficient, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [ppo, gspo])
@pytest.mark.parametrize("clip", [Clip(), HIGHER, DUAL])
def test_ppo_and_gspo_have_upstreams_bits(clip, function):
    """Loss and gradient; of gspo's gradient all but the order in which a sequence's tokens are added up."""
    kind, mode = function.__name__, "token-mean" if function is ppo else "seq-mean-token-mean"
    theirs_of = PolicyLoss(clip.low, clip.high, clip.dual, token_level_loss=mode == "token-mean", policy_loss_type=kind)
    for seed in range(20):
        batch = ragged(seed, samples=5, places=9, dtype=torch.float32, spread=0.4).batch().detached()
        totals = {"batch_num_tokens": 37.0, "global_batch_size": 5.0, "dp_size": 2}
        theirs, ours = (batch.log_probs.clone().requires_grad_() for _ in range(2))
        mask = batch.mask.float()
        loss, clipped, kl, *_ = theirs_of(theirs, batch.old_log_probs, batch.advantages, mask, **totals)
        terms = function(replace(batch, log_probs=ours), clip)
        own = aggregate(terms.loss, batch.mask, mode, **totals)
        own.backward()
        loss.backward()
        assert torch.equal(loss, own)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0 if function is ppo else 1e-6, atol=0)
        assert of(terms.metrics["ppo_kl"]) == pytest.approx(kl.item(), rel=1e-5, abs=1e-6)
        if clip.dual is None:
            assert of(terms.metrics["ppo_clip_ratio"]) == pytest.approx(clipped.item())


def of(metric):
    total, count = metric
    return (total / count).item()


@pytest.mark.parametrize(
    ("tau", "ratio", "value", "slope"),
    [
        (1.0, 0.5, 1.510163, 0.940015),
        (1.0, 3.0, 3.523188, 0.419974),
        (1.05, 1.0, 1.904762, 1),
        (1.05, 1.5, 2.393585, 0.934140),
    ],
)
def test_sapos_gate_by_numbers(tau, ratio, value, slope):
    """τ_pos = 1 and τ_neg = 1.05, the published ones, are told apart by the sign of the advantage."""
    advantage = 1.0 if tau == 1.0 else -1.0
    batch = MicroBatch(*(torch.tensor([[one]]) for one in (math.log(ratio), 0.0, advantage, 1.0)))
    terms = sapo(batch, Sapo())
    assert -terms.loss.item() * advantage == pytest.approx(value, abs=1e-6)
    assert terms.coefficient.item() * advantage / ratio == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(("ratio", "weight"), [(1.5, 1.28), (0.5, 0.5), (1e-4, 1e-4), (1.2, 1.2)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_by_numbers(ratio, weight, advantage):
    """Only the weight is bounded, from above; no token loses its gradient."""
    batch = MicroBatch(*(torch.tensor([[one]]) for one in (math.log(ratio), 0.0, advantage, 1.0)))
    assert cispo(batch, Cispo()).coefficient.item() == pytest.approx(weight * advantage)
    assert gpg(batch).coefficient.item() == advantage


@pytest.mark.parametrize(
    ("ratio", "advantage", "plain", "higher", "dual"),
    [
        (1.25, 1.0, 0, 1.25, 1.25),
        (1.3, 1.0, 0, 0, 0),
        (0.7, 1.0, 0.7, 0.7, 0.7),
        (0.75, -1.0, 0, 0, 0),
        (1.4, -1.0, -1.4, -1.4, -1.4),
        (1.6, -1.0, -1.6, -1.6, 0),
    ],
)
def test_what_the_clips_cut_off(ratio, advantage, plain, higher, dual):
    batch = MicroBatch(*(torch.tensor([[one]]) for one in (math.log(ratio), 0.0, advantage, 1.0)))
    found = [ppo(batch, clip).coefficient.item() for clip in (Clip(), HIGHER, DUAL)]
    assert found == pytest.approx([plain, higher, dual])


def test_the_settings_of_a_loss_come_from_a_runs_arguments():
    clip = SimpleNamespace(eps_clip=0.2, eps_clip_low_high=None, dual_clip=None)
    assert Clip.of(SimpleNamespace(actor=clip)) == Clip()
    clip.eps_clip_low_high, clip.dual_clip = (0.1, 0.3), 2.0
    assert Clip.of(SimpleNamespace(actor=clip)) == Clip(0.1, 0.3, 2.0)


def flags(**given):
    """Those that the losses' checks read, at upstream's defaults but for the given ones."""
    defaults = {
        "actor__policy_loss_type": "ppo",
        "actor__loss_agg_mode": "token-mean",
        "actor__dual_clip": None,
        "actor__eps_clip_low_high": None,
        "actor__acpo__loss_agg_mode": "seq-mean-token-mean",
        "rollout__max_new_tokens": 1024,
    }
    return {name.replace("__", "."): value for name, value in {**defaults, **given}.items()}


@pytest.mark.parametrize(
    ("own", "given", "named"),
    [
        (PolicyLossOptions(), {"dual_clip": 3.0, "policy_loss_type": "clip_cov"}, ["dual_clip", "policy_loss_type"]),
        (PolicyLossOptions(), {"dual_clip": 3.0, "policy_loss_type": "sapo"}, ["dual_clip", "policy_loss_type"]),
        (PolicyLossOptions(), {"dual_clip": 0.9}, ["dual_clip"]),
        (
            PolicyLossOptions(),
            {"eps_clip_low_high": [0.2, 0.28], "policy_loss_type": "gpg"},
            ["eps_clip_low_high", "policy_loss_type"],
        ),
        (
            PolicyLossOptions(),
            {"policy_loss_type": "gspo", "loss_agg_mode": "seq-mean-token-sum-norm"},
            ["loss_agg_mode", "gspo"],
        ),
        (PolicyLossOptions(loss_max_length=0), {}, ["loss_max_length"]),
        (
            PolicyLossOptions(),
            {"loss_agg_mode": "seq-mean-token-sum-norm", "rollout__max_new_tokens": None},
            ["actor.loss_agg_mode", "loss_max_length", "rollout.max_new_tokens"],
        ),
        (
            PolicyLossOptions(),
            {
                "policy_loss_type": "acpo",
                "acpo__loss_agg_mode": "seq-mean-token-sum-norm",
                "rollout__max_new_tokens": None,
            },
            ["acpo.loss_agg_mode", "loss_max_length", "rollout.max_new_tokens"],
        ),
        (Sapo(tau_pos=0.0), {"policy_loss_type": "sapo"}, ["sapo.tau_pos"]),
        (Sapo(tau_neg=-1.0), {"policy_loss_type": "sapo"}, ["sapo.tau_neg"]),
        (Acpo(tau_neg=math.nan), {"policy_loss_type": "acpo"}, ["acpo.tau_neg"]),
        (Acpo(variant="detached", clamp=True), {"policy_loss_type": "acpo"}, ["acpo.clamp", "acpo.variant"]),
        (
            Acpo(),
            {"policy_loss_type": "acpo", "loss_agg_mode": "seq-mean-token-sum-norm"},
            ["actor.loss_agg_mode", "acpo.loss_agg_mode"],
        ),
        (Cispo(eps_low=1.5), {"policy_loss_type": "cispo"}, ["cispo.eps_low"]),
        (Cispo(eps_high=-0.1), {"policy_loss_type": "cispo"}, ["cispo.eps_high"]),
        (ClipCov(ratio=0.0), {"policy_loss_type": "clip_cov"}, ["clip_cov.ratio"]),
        (ClipCov(low=5.0), {"policy_loss_type": "clip_cov"}, ["clip_cov.low", "clip_cov.high"]),
        (KlCov(ratio=1.1), {"policy_loss_type": "kl_cov"}, ["kl_cov.ratio"]),
        (KlCov(coef=0.0), {"policy_loss_type": "kl_cov"}, ["kl_cov.coef"]),
    ],
)
def test_senseless_settings_are_refused_by_name(own, given, named):
    (problem,) = own.problems(
        flags(**{name if name.startswith("rollout") else f"actor__{name}": value for name, value in given.items()})
    )
    assert problem.startswith("--actor.") and all(name in problem for name in named)


@pytest.mark.parametrize("own", [Sapo(0.0), Acpo(tau_pos=0.0), Cispo(9.0), ClipCov(0.0), KlCov(0.0)])
def test_settings_of_a_loss_that_is_not_chosen_are_not_checked(own):
    assert own.problems(flags()) == []


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_may_be_chosen_with_its_published_settings(loss):
    for own in (PolicyLossOptions(), Sapo(), Acpo(), Cispo(), ClipCov(), KlCov()):
        assert own.problems(flags(actor__policy_loss_type=loss)) == []
    if loss in ("ppo", "gspo"):
        higher = {"actor__dual_clip": 3.0, "actor__eps_clip_low_high": [0.2, 0.28]}
        assert PolicyLossOptions().problems(flags(actor__policy_loss_type=loss, **higher)) == []


@pytest.mark.parametrize(
    ("loss", "given", "expected"),
    [
        ("ppo", "token-mean", ("token-mean", 100)),
        ("ppo", "seq-mean-token-sum-norm", ("seq-mean-token-sum-norm", 100)),
        ("gspo", "token-mean", ("seq-mean-token-mean", 100)),
        ("acpo", "token-mean", ("seq-mean-token-mean", 100)),
    ],
)
def test_how_a_run_aggregates(loss, given, expected):
    actor = SimpleNamespace(policy_loss_type=loss, loss_agg_mode=given, loss_max_length=None, acpo=Acpo())
    args = SimpleNamespace(actor=actor, rollout=SimpleNamespace(max_new_tokens=100))
    assert aggregation(args) == expected
    actor.loss_max_length = 7
    assert aggregation(args) == (expected[0], 7)
