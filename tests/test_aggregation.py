"""From tokens to one number: upstream's bits, Dr. GRPO's fixed length, and sums over micro-batches and ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.models import aggregate_loss
from openrlhf.rlvr.aggregation import MODES, aggregate

LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [5.0, 5.0, 5.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
TOTALS = {"batch_num_tokens": 5.0, "global_batch_size": 2.0}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 63 / 5),
        ("seq-mean-token-mean", (1.5 + 20) / 2),
        ("seq-mean-token-sum-norm", (3 / 8 + 60 / 8) / 2),
    ],
)
def test_the_modes_by_hand(mode, expected):
    for dp_size in (1, 4):
        found = aggregate(LOSS, MASK, mode, **TOTALS, dp_size=dp_size, max_length=8)
        assert found.item() == pytest.approx(expected * dp_size)


def test_dr_grpos_length_is_not_that_of_the_responses():
    longer = torch.cat([LOSS, LOSS], dim=1), torch.cat([MASK, MASK], dim=1)
    once, twice = (
        aggregate(*pair, "seq-mean-token-sum-norm", **TOTALS, max_length=8) for pair in ((LOSS, MASK), longer)
    )
    assert twice.item() == pytest.approx(2 * once.item())


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5))
def test_upstreams_modes_have_upstreams_bits(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    loss, mask = torch.randn(rows, 9, generator=generator), torch.rand(rows, 9, generator=generator) < 0.5
    totals = {"batch_num_tokens": torch.tensor(17.0), "global_batch_size": torch.tensor(6.0), "dp_size": 2}
    for mode in MODES[:2]:
        theirs = aggregate_loss(loss, mask.float(), token_level_loss=mode == "token-mean", **totals)
        assert torch.equal(aggregate(loss, mask, mode, **totals), theirs)


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**32), cuts=st.sets(st.integers(1, 7)))
def test_micro_batches_and_ranks_add_up_to_the_step(mode, seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    loss, mask = torch.randn(8, 6, generator=generator), torch.rand(8, 6, generator=generator) < 0.4
    tokens, samples = max(1, int(mask.sum())), max(1, int(mask.any(-1).sum()))
    totals = {"batch_num_tokens": tokens, "global_batch_size": samples, "max_length": 10}
    borders = [0, *sorted(cuts), 8]
    parts = [aggregate(loss[start:end], mask[start:end], mode, **totals) for start, end in pairwise(borders)]
    whole = aggregate(loss, mask, mode, **totals)
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)
    # Two ranks with the gradients' mean in the end.
    ranks = [aggregate(loss[one::2], mask[one::2], mode, **totals, dp_size=2) for one in (0, 1)]
    assert (sum(ranks) / 2).item() == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_behind_the_mask_does_not_count(mode):
    spoilt = torch.where(MASK == 1, LOSS, torch.nan).requires_grad_()
    found = aggregate(spoilt, MASK, mode, **TOTALS, max_length=8)
    assert found.item() == aggregate(LOSS, MASK, mode, **TOTALS, max_length=8).item()
    found.backward()
    assert (spoilt.grad[MASK == 0] == 0).all()
    nothing = aggregate(LOSS, torch.zeros_like(MASK), mode, batch_num_tokens=1, global_batch_size=1, max_length=8)
    assert nothing.item() == 0


def test_an_unknown_mode_and_a_missing_length_are_named():
    with pytest.raises(ValueError, match="'sum'"):
        aggregate(LOSS, MASK, "sum", **TOTALS)
    with pytest.raises(ValueError, match="'seq-mean-token-sum-norm' with max_length None"):
        aggregate(LOSS, MASK, "seq-mean-token-sum-norm", **TOTALS)
