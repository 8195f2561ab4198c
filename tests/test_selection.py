"""Choosing among all tokens of a step: exact counts, ties by key, and chance that is the same everywhere."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from softmax_reference import ragged

from openrlhf.rlvr.micro_batch import MicroBatch
from openrlhf.rlvr.selection import greatest, reached, scattered, table


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_the_greatest_values_and_of_equal_ones_the_lowest_keys(values, data):
    keys = data.draw(st.permutations(range(len(values))))
    count = data.draw(st.integers(1, len(values)))
    columns = torch.tensor(values, dtype=torch.float32), torch.tensor(keys)
    chosen = reached(*columns, greatest(*columns, count))
    best = sorted(range(len(values)), key=lambda one: (-values[one], keys[one]))[:count]
    assert chosen.nonzero().flatten().tolist() == sorted(best)


def test_keys_are_of_the_sample_and_the_place_in_its_response():
    batch = ragged(3, samples=3).batch()
    keys, log_probs = table([batch], lambda one: (one.log_probs,))
    assert len(keys) == batch.mask.sum() and len(keys.unique()) == len(keys)
    expected = [(row << 24) + place for row, count in enumerate(batch.mask.sum(-1)) for place in range(count)]
    assert keys.tolist() == expected and torch.equal(log_probs, batch.log_probs[batch.mask].detach())
    # In the order of the keys, whatever comes first: sums over a table have the same bits everywhere.
    backwards = MicroBatch(**{name: _reversed(value) for name, value in vars(batch).items()})
    assert all(map(torch.equal, table([backwards], lambda one: (one.log_probs,)), (keys, log_probs)))


def _reversed(value):
    return value.flip(0) if isinstance(value, torch.Tensor) else value


def test_chance_by_key_is_even_and_reproducible():
    keys = (torch.arange(4000) << 24) + torch.arange(4000) % 7
    first = scattered(keys, 1)
    assert torch.equal(first, scattered(keys.flip(0), 1).flip(0)) and len(first.unique()) == len(keys)
    shares = torch.stack([(first >> bit & 1).double().mean() for bit in range(64)])
    assert ((shares - 0.5).abs() < 0.04).all()
    again = scattered(keys, 2)
    together = ((first > 0) & (again > 0)).double().mean().item()
    assert abs(together - 0.25) < 0.03


def test_splitmix64_by_its_published_numbers():
    """The first outputs of the generator with seed 1234567."""
    found = scattered(torch.tensor([1234567, 1234567]), 0)[0].item(), scattered(torch.tensor([1234567]), 1).item()
    assert [one % 2**64 for one in found] == [6457827717110365317, 3203168211198807973]
