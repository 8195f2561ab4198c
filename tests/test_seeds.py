"""Seeds of draws, samples and updates: distinct where they must be, equal where they must be."""

from copy import deepcopy
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader
from vllm import SamplingParams

from openrlhf.repeat.prompts import seeded_datasets
from openrlhf.repeat.seeds import derive, for_sample, repeatable_optimizer


@given(st.lists(st.integers(-(2**70), 2**70) | st.text(), max_size=4))
def test_a_seed_fits_an_int64_and_depends_on_its_parts_alone(parts):
    assert 0 <= derive(*parts) < 2**63
    assert derive(*parts) == derive(*parts)


def test_t08_t09_no_two_samples_of_a_long_run_share_a_seed():
    """Date-like run seeds, many draws, many samples; a number is not the text that spells it."""
    runs = (20261129, 20261130)
    draws = [derive(run, kind, draw) for run in runs for kind in ("training", "evaluation") for draw in range(500)]
    samples = [for_sample(SamplingParams(seed=draw), index).seed for draw in draws for index in range(8)]
    assert len(set(draws) | set(samples)) == len(draws) + len(samples)
    assert derive(1) != derive("1") and derive("a", "b") != derive("ab")


def test_each_sample_has_parameters_of_its_own():
    """Executors write into the parameters that they are given."""
    shared = SamplingParams(seed=7, max_tokens=5)
    first, second = for_sample(shared, 0), for_sample(shared, 1)
    first.max_tokens = 1
    assert (shared.max_tokens, second.max_tokens) == (5, 5)
    assert len({shared.seed, first.seed, second.seed}) == 3
    assert for_sample(SamplingParams(), 3).seed is None


def loaders(seed, rows=20):
    def prepare(strategy, tokenizer):
        data = list(range(rows))
        return StatefulDataLoader(data, batch_size=1, shuffle=True, collate_fn=list), None, rows

    return seeded_datasets(prepare, SimpleNamespace(args=SimpleNamespace(train=SimpleNamespace(seed=seed))), None)[0]


def order(source, epochs=2):
    return [row for _ in range(epochs) for (row,) in source]


# torchdata calls a function that this torch deprecates.
quiet = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@quiet
def test_the_order_of_prompts_follows_from_the_seed_alone():
    torch.manual_seed(0)
    first = order(loaders(3))
    torch.manual_seed(1)
    assert order(loaders(3)) == first
    assert order(loaders(4)) != first
    assert first[:20] != first[20:], "every epoch has an order of its own"


def steps_of_episodes(source, batch, episode=0, episodes=3):
    """Rows of each training step and the state in its checkpoint, in the way in which upstream runs episodes."""
    for current in range(episode, episodes):
        rows, exhausted = iter(source), False
        while not exhausted:
            step = [row for (row,) in islice(rows, batch)]
            exhausted = len(step) < batch
            if step:
                yield step, {"episode": current, "source": deepcopy(source.state_dict())}


@quiet
@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 12))
def test_a_source_restored_after_any_step_goes_on_where_it_stopped(rows, batch):
    """Whole and partial last batches, at the end of an episode too; other random numbers may be drawn meanwhile."""
    whole = list(steps_of_episodes(loaders(5, rows), batch))
    for done, (_, state) in enumerate(whole, 1):
        torch.manual_seed(done)
        restored = loaders(5, rows)
        restored.load_state_dict(state["source"])
        rest = list(steps_of_episodes(restored, batch, state["episode"]))
        assert [step for step, _ in rest] == [step for step, _ in whole[done:]]
        assert restored.draws == 3 * rows


def test_on_cpu_adam_is_torchs_and_muon_is_left_alone():
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    assert repeatable_optimizer(adam)["params"] == {"lr": 0.1, "torch_adam": True}
    assert adam["params"] == {"lr": 0.1}
    muon = {"type": "Muon", "params": {}}
    assert repeatable_optimizer(muon) is muon
