"""The methods of an update together: off they are PPO, and neither micro-batches nor ranks change them."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_reference import ragged

from openrlhf.rlvr.acpo import Acpo
from openrlhf.rlvr.aggregation import aggregate
from openrlhf.rlvr.covariance import ClipCov, KlCov
from openrlhf.rlvr.entropy import EntropyAdvantage
from openrlhf.rlvr.fork_tokens import ForkTokens
from openrlhf.rlvr.gtpo import Gtpo
from openrlhf.rlvr.importance import Correction
from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.modulation import Modulation
from openrlhf.rlvr.objective import Objective
from openrlhf.rlvr.ppo import Clip, ppo
from openrlhf.rlvr.sapo import Sapo
from openrlhf.rlvr.score import Cispo

CLIP = Clip(0.2, 0.28)
OFF = Objective("ppo", CLIP, Modulation(), ForkTokens(), EntropyAdvantage(), Gtpo(), Correction())
MODULATED = Modulation(enable=True)
TRUNCATED = Correction("token", "clip", "ratio", (0.5, 2.0))

EACH = {
    "modulation": replace(OFF, modulation=MODULATED),
    "compensation": replace(OFF, modulation=Modulation(enable=True, terms="compensation")),
    "stabilisation": replace(OFF, modulation=Modulation(enable=True, terms="stabilisation")),
    "microbatch": replace(OFF, modulation=Modulation(enable=True, scope="microbatch")),
    "sequence": replace(OFF, modulation=Modulation(enable=True, scope="sequence", centring="sequence")),
    "forks": replace(OFF, forks=ForkTokens(enable=True)),
    "forks alone": replace(OFF, forks=ForkTokens(enable=True, normaliser="selected")),
    "entropy advantage": replace(OFF, entropy=EntropyAdvantage(enable=True)),
    "gtpo": replace(OFF, gtpo=Gtpo(enable=True, max_entropy=1.2)),
    "correction": replace(OFF, correction=TRUNCATED),
    "gspo corrected": replace(OFF, loss="gspo", correction=TRUNCATED),
    "gspo": replace(OFF, loss="gspo"),
    "sapo": replace(OFF, loss="sapo", options=Sapo()),
    "acpo": replace(OFF, loss="acpo", options=Acpo()),
    "cispo": replace(OFF, loss="cispo", options=Cispo()),
    "gpg": replace(OFF, loss="gpg", options=None),
    "clip_cov": replace(OFF, loss="clip_cov", options=(ClipCov(0.1, -9.0, 9.0), CLIP)),
    "kl_cov": replace(OFF, loss="kl_cov", options=KlCov(0.1)),
}
TOGETHER = {
    "all on ppo": replace(
        OFF,
        modulation=MODULATED,
        forks=ForkTokens(enable=True, fraction=0.5, normaliser="selected"),
        entropy=EntropyAdvantage(enable=True),
        gtpo=Gtpo(enable=True, max_entropy=1.4),
        correction=TRUNCATED,
    ),
    "modulated acpo at forks": replace(
        OFF, loss="acpo", options=Acpo(variant="unrouted"), modulation=MODULATED, forks=ForkTokens(enable=True)
    ),
    "modulated clip_cov": replace(EACH["clip_cov"], modulation=MODULATED),
    "modulated kl_cov with gtpo": replace(
        EACH["kl_cov"], modulation=MODULATED, gtpo=Gtpo(enable=True, max_entropy=1.4)
    ),
    "gspo at forks": replace(OFF, loss="gspo", forks=ForkTokens(enable=True)),
}
WHOLE_STEP = {name: one for name, one in (EACH | TOGETHER).items() if name not in ("microbatch",)}


def step(seed=11, samples=7):
    """All samples of an optimizer step, everything given; on some tokens log π = log π_old."""
    case = ragged(seed, samples=samples, places=8, dtype=torch.float32, spread=0.3)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = case.mask.shape
    weights = torch.tensor([0.0, 1.0, 1.0, 2.0])[torch.randint(0, 4, shape, generator=generator)]
    rollout = case.old + 0.3 * torch.randn(shape, generator=generator)
    samples_ = 3 * torch.randperm(samples, generator=generator) + 1
    batch = case.batch(rollout_log_probs=rollout, conflict_weights=weights, samples=samples_).detached()
    same = torch.rand(shape, generator=generator) < 0.3
    return replace(batch, old_log_probs=torch.where(same, batch.log_probs, batch.old_log_probs))


def rows(batch, places, padding=0):
    """A micro-batch of some samples, with further places before them that hold nothing."""
    index = torch.tensor(places)
    fields = {}
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            value = value[index]
            if name != "samples":
                value = torch.cat([torch.full_like(value[:, :1], 0).expand(-1, padding), value], dim=-1)
        fields[name] = value
    return MicroBatch(**fields)


TOTALS = {"batch_num_tokens": 31.0, "global_batch_size": 6.0}


def gradients(objective, batches, summary, mode, dp_size=1):
    """By sample id: the gradient of the aggregated loss by log π of its response tokens; and metrics' sums."""
    found, sums = {}, {}
    for batch in batches:
        leaf = batch.log_probs.detach().requires_grad_()
        terms, counted = objective.terms(replace(batch, log_probs=leaf), summary)
        loss = aggregate(
            terms.loss,
            counted,
            mode,
            batch_num_tokens=TOTALS["batch_num_tokens"] * summary.tokens,
            global_batch_size=TOTALS["global_batch_size"] * summary.samples,
            dp_size=dp_size,
            max_length=10,
        )
        (gradient,) = torch.autograd.grad(loss, leaf)
        for sample, row, mask in zip(batch.samples.tolist(), gradient, batch.mask, strict=True):
            found[sample] = row[mask] / dp_size
        for name, (total, count) in terms.metrics.items():
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + total.item(), before[1] + count.item())
    return found, sums


def assert_same(found, expected):
    assert found[0].keys() == expected[0].keys() and found[1].keys() == expected[1].keys()
    for sample, gradient in expected[0].items():
        torch.testing.assert_close(found[0][sample], gradient, rtol=1e-6, atol=1e-7)
    for name, pair in expected[1].items():
        assert found[1][name] == pytest.approx(pair, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("name", WHOLE_STEP)
@settings(max_examples=15)
@given(data=st.data(), mode=st.sampled_from(["token-mean", "seq-mean-token-mean"]))
def test_micro_batches_do_not_change_what_is_learned(name, data, mode):
    objective, batch = WHOLE_STEP[name], step()
    order = data.draw(st.permutations(range(7)))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 6)))), 7]
    parts = [rows(batch, order[start:end], data.draw(st.integers(0, 2))) for start, end in pairwise(cuts)]
    whole = gradients(objective, [batch], objective.summarise([batch], seed=4), mode)
    assert_same(gradients(objective, parts, objective.summarise(parts, seed=4), mode), whole)
    assert any((one != 0).any() for one in whole[0].values())


def on_a_rank(rank, folder):
    """Both ranks' results, each with its share of the samples in micro-batches of its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    shares = ([[6, 0], [3]], [[1], [5, 2, 4]])
    results = {}
    for name, objective in WHOLE_STEP.items():
        parts = [rows(step(), places, rank) for places in shares[rank]]
        summary = objective.summarise(parts, seed=4, group=dist.group.WORLD)
        results[name] = gradients(objective, parts, summary, "token-mean", dp_size=2)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_do_not_change_what_is_learned(tmp_path):
    torch.multiprocessing.spawn(on_a_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name, objective in WHOLE_STEP.items():
        batch = step()
        whole = gradients(objective, [batch], objective.summarise([batch], seed=4), "token-mean")
        (first, sums), (second, others) = (one[name] for one in ranks)
        added = {key: tuple(a + b for a, b in zip(sums[key], others[key], strict=True)) for key in sums}
        assert_same((first | second, added), whole)


def test_with_everything_off_it_is_ppo_to_the_bit():
    batch = step()
    leaf, other = (batch.log_probs.clone().requires_grad_() for _ in range(2))
    summary = OFF.summarise([batch])
    assert not OFF.needs_summary and not OFF.needs
    terms, counted = OFF.terms(replace(batch, log_probs=leaf), summary)
    alone = ppo(replace(batch, log_probs=other), CLIP)
    assert torch.equal(counted, batch.mask) and torch.equal(terms.loss, alone.loss)
    terms.loss.sum().backward()
    alone.loss.sum().backward()
    assert torch.equal(leaf.grad, other.grad) and terms.metrics.keys() == alone.metrics.keys()


@pytest.mark.parametrize("name", EACH)
def test_each_option_changes_the_gradient_and_off_it_does_not(name):
    """Switched on by one setting; the rest of its settings have no effect while it is off."""
    batch = step()
    with_it, without = (gradients(one, [batch], one.summarise([batch]), "token-mean")[0] for one in (EACH[name], OFF))
    assert any(not torch.equal(with_it[sample], without[sample]) for sample in without)
    parts = {part: getattr(EACH[name], part) for part in ("modulation", "forks", "entropy", "gtpo")}
    switched = {part: replace(own, enable=False) for part, own in parts.items()}
    off = replace(EACH[name], loss="ppo", options=CLIP, correction=Correction(), **switched)
    again = gradients(off, [batch], off.summarise([batch]), "token-mean")[0]
    assert all(torch.equal(again[sample], without[sample]) for sample in without)


@pytest.mark.parametrize("name", WHOLE_STEP)
def test_steps_without_tokens_and_of_one_token_are_finite(name):
    objective, batch = WHOLE_STEP[name], step()
    nothing = {one: torch.full_like(value, math.nan) for one, value in vars(batch).items() if is_real(value)}
    single = torch.zeros_like(batch.mask)
    single[torch.nonzero(batch.mask)[0].unbind()] = True
    for masked in (replace(batch, **nothing, mask=torch.zeros_like(batch.mask)), replace(batch, mask=single)):
        summary = objective.summarise([masked])
        for mode in ("token-mean", "seq-mean-token-mean"):
            found, metrics = gradients(objective, [masked], summary, mode)
            assert all(torch.isfinite(one).all() for one in found.values())
            assert all(math.isfinite(total) for total, _ in metrics.values())


def is_real(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("name", EACH | TOGETHER)
def test_what_is_not_needed_need_not_be_there(name):
    objective, batch = (EACH | TOGETHER)[name], step()
    always = {"log_probs", "old_log_probs", "advantages", "mask", "vocabulary"}
    fields = {one: value for one, value in vars(batch).items() if one in always | objective.needs}
    small = MicroBatch(**fields)
    objective.terms(small, objective.summarise([small]))
    for one in objective.needs:
        without = MicroBatch(**{key: value for key, value in fields.items() if key != one})
        with pytest.raises(ValueError, match=rf"MicroBatch\.{one}"):
            objective.terms(without, objective.summarise([without]))


@pytest.mark.parametrize("name", [one for one in EACH | TOGETHER if "correct" not in one])
def test_the_coefficient_tells_what_is_learned_from_a_token(name):
    """C = −∂(Σ loss)/∂log π(y) with all methods in it, but for a mode's own part in acpo unrouted."""
    objective, batch = (EACH | TOGETHER)[name], step()
    objective = replace(objective, correction=Correction())
    leaf = batch.log_probs.clone().requires_grad_()
    terms, _ = objective.terms(replace(batch, log_probs=leaf), objective.summarise([batch]))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
    torch.testing.assert_close(terms.coefficient, -gradient, rtol=1e-5, atol=1e-6)


def test_a_token_without_a_gradient_is_no_greatest_entropy_change():
    """Where only forks learn, the modulation compares with the changes that forks make."""
    batch, at_forks = step(), replace(EACH["modulation"], forks=ForkTokens(enable=True))
    forks, everywhere = (one.summarise([batch]).extremes for one in (at_forks, EACH["modulation"]))
    assert 0 < forks.change_max < everywhere.change_max and forks.entropy_min == everywhere.entropy_min


def test_normalisers_count_what_is_left():
    """GTPO leaves samples out, and forks alone count: the loss is the mean over these tokens, or over their samples."""
    batch = step()
    for name in ("gtpo", "forks alone", "all on ppo"):
        objective = (EACH | TOGETHER)[name]
        summary = objective.summarise([batch])
        _, counted = objective.terms(batch, summary)
        assert 0 < summary.tokens < 1 and 0 < summary.samples <= 1
        assert summary.tokens * batch.mask.sum().item() == pytest.approx(counted.sum().item())
        assert summary.samples * batch.mask.any(-1).sum().item() == pytest.approx(counted.any(-1).sum().item())
    for name in ("modulation", "forks", "clip_cov"):
        assert EACH[name].summarise([batch]).tokens == 1


def test_the_metrics_show_that_a_method_acted():
    batch = step()
    for name, metric in {
        "modulation": "modulation_stabilised",
        "forks": "fork_tokens",
        "entropy advantage": "entropy_advantage",
        "gtpo": "gtpo_conflict",
        "acpo": "acpo_aligned",
        "sapo": "sapo_gate",
        "clip_cov": "clip_cov_detached",
        "kl_cov": "kl_cov_penalised",
        "cispo": "cispo_bounded",
        "correction": "is_filter_ratio",
    }.items():
        objective = EACH[name]
        total, count = objective.terms(batch, objective.summarise([batch]))[0].metrics[metric]
        assert 0 < (total / count).item() < 1, name
        assert metric not in OFF.terms(batch, OFF.summarise([batch]))[0].metrics


def test_a_run_chooses_its_methods_by_its_flags():
    parts = {"modulation": MODULATED, "entropy_advantage": EntropyAdvantage(), "gtpo": Gtpo()}
    correction = {"level": "token", "mode": "clip", "gating": "ratio", "threshold": [0.5, 2.0]}
    advantage = SimpleNamespace(**{f"is_correction_{name}": value for name, value in correction.items()})
    actor = SimpleNamespace(policy_loss_type="sapo", sapo=Sapo(0.9, 1.1), fork_tokens=ForkTokens(enable=True))
    args = SimpleNamespace(actor=actor, algo=SimpleNamespace(**parts, advantage=advantage))
    expected = replace(
        OFF,
        loss="sapo",
        options=Sapo(0.9, 1.1),
        modulation=MODULATED,
        forks=ForkTokens(enable=True),
        correction=TRUNCATED,
    )
    assert Objective.of(args) == expected
