"""Batches of ragged groups: exact budgets, order of dispatch, nothing lost at the end of the data or over a resume."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from arguments import arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from openrlhf.repeat.seeds import derive
from openrlhf.rlvr.prompts import IdentifiedPrompts, RaggedPromptSource
from openrlhf.rlvr.sampling import RaggedSamplesGenerator
from openrlhf.trainer.ppo_utils.experience import Experience

quiet = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Instant(RaggedSamplesGenerator):
    """Answers by itself instead of asking engines: in any order, right or wrong as the seed of a sample decides."""

    answered = staticmethod(lambda draw, index: answer(draw, index))

    def _dispatch(self, draws, evaluating, **generate_kwargs):
        return {draw.number: (draw, 0) for draw in draws}

    def _arrivals(self, pending, **generate_kwargs):
        while pending:
            number = min(pending, key=lambda one: derive(self.haste, one))
            draw, _ = pending.pop(number)
            yield draw, [self.answered(draw, index) for index in range(draw.n_samples)]


def answer(draw, index):
    right = float(derive(draw.number, index) % 5 < int(draw.label[0]))
    tokens = torch.tensor([[draw.number, index, int(draw.label[0])]])
    reward = torch.tensor([right])
    return Experience(sequences=tokens, labels=[draw.label], rewards=reward, scores=reward.clone())


def loader(args, rows, seed=3):
    """Prompts that are right never (0), sometimes, or always (5)."""
    table = [{"input": f"prompt {row}", "label": str(row % 6)} for row in range(rows)]
    strategy = SimpleNamespace(args=args, is_rank_0=lambda: False)
    data = IdentifiedPrompts(table, None, strategy)
    torch.manual_seed(seed)
    return StatefulDataLoader(data, batch_size=1, shuffle=True, collate_fn=data.collate_fn)


def generator(args, rows, haste=0):
    strategy = SimpleNamespace(args=args)
    source = RaggedPromptSource(loader(args, rows), args.algo.allocation.decay)
    made = Instant(strategy, source, None, None, [])
    made.haste = haste
    return made


def run(made, episodes, start=0):
    """Batches of all episodes, as upstream's trainer asks for them, with what a checkpoint would hold."""
    for episode in range(start, episodes):
        ended = False
        while not ended:
            samples, _, drawn, ended = made.generate_samples()
            assert drawn or samples or ended, "a call that does nothing would be repeated for ever"
            if samples:
                yield samples, {"episode": episode, "source": deepcopy(made.prompts_dataloader.state_dict())}


@pytest.fixture(scope="module", autouse=True)
def _no_ray():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("openrlhf.repeat.samples.ray.put", lambda value: value)
        yield


CONFIGURATIONS = st.fixed_dictionaries(
    {
        "algo__allocation__strategy": st.sampled_from(["uniform", "dynamic"]),
        "rollout__batch_size": st.integers(1, 6),
        "rollout__n_samples_per_prompt": st.integers(2, 6),
        "algo__dynamic_filtering_enable": st.booleans(),
        "algo__allocation__min_history": st.integers(2, 8),
        "algo__allocation__decay": st.sampled_from([1.0, 0.5]),
        "train__async_enable": st.booleans(),
    }
)


def completed(flags, ahead):
    flags = {**flags, "rollout__vllm_generate_batch_size": flags["rollout__batch_size"] + ahead}
    flags |= {"data__label_key": "label"}
    return arguments(**flags, algo__allocation__min_samples=2, algo__dynamic_filtering_range=[0.0, 1.0])


def identities(samples):
    return [(one.samples[0].group.draw, one.samples[0].number) for one in samples]


@quiet
@settings(max_examples=60)
@given(CONFIGURATIONS, st.integers(0, 7), st.integers(1, 20))
def test_batches_are_whole_groups_in_order_and_spend_the_budget_exactly(flags, ahead, rows):
    args = completed(flags, ahead)
    size, average = args.rollout.batch_size, args.rollout.n_samples_per_prompt
    low, high = 2, -(-3 * average // 2)
    made = generator(args, rows)
    learnt = []
    for samples, _ in run(made, episodes=2):
        found = identities(samples)
        groups = {one.samples[0].group for one in samples}
        assert found == sorted(found)
        assert found == [
            (group.draw, index) for group in sorted(groups, key=lambda g: g.draw) for index in range(group.count)
        ]
        assert all(low <= group.count <= high for group in groups)
        assert len(groups) <= size
        assert all(one.labels == [one.samples[0].group.label] for one in samples)
        if len(groups) == size:
            assert len(samples) == size * average
        learnt += found
    assert len(set(learnt)) == len(learnt)
    if not args.algo.dynamic_filtering_enable:
        assert len(learnt) == 2 * rows * average
    source = made.prompts_dataloader
    assert source.draws == 2 * rows and not source.waiting
    assert sum(source.statistics.counts(one)[0] > 0 for one in source.loader.dataset.ids) == rows


@quiet
@settings(max_examples=40)
@given(CONFIGURATIONS, st.integers(0, 7), st.integers(1, 20), st.data())
def test_a_checkpoint_of_any_step_goes_on_with_the_same_samples(flags, ahead, rows, data):
    args = completed(flags, ahead)
    whole = list(run(generator(args, rows), episodes=3))
    if not whole:
        return
    done = data.draw(st.integers(1, len(whole)))
    state = whole[done - 1][1]
    restored = generator(args, rows)
    restored.prompts_dataloader.load_state_dict(state["source"])
    rest = list(run(restored, 3, state["episode"]))
    assert [identities(samples) for samples, _ in rest] == [identities(samples) for samples, _ in whole[done:]]
    counts = [[one.samples[0].group for one in samples] for samples, _ in rest]
    assert counts == [[one.samples[0].group for one in samples] for samples, _ in whole[done:]]


@quiet
@settings(max_examples=40)
@given(CONFIGURATIONS, st.integers(1, 20), st.integers(1, 99))
def test_who_answers_first_decides_nothing_in_synchronous_training(flags, rows, haste):
    args = completed({**flags, "train__async_enable": False}, 0)
    runs = [list(run(generator(args, rows, hurry), episodes=2)) for hurry in (0, haste)]
    first, second = [[[one.samples[0] for one in samples] for samples, _ in found] for found in runs]
    assert first == second


@quiet
def test_r16_accepted_groups_at_the_end_of_the_data_are_kept():
    """Six prompts in batches of four, of which the filter rejects one in the second batch: no replacement is left."""
    flags = {"rollout__batch_size": 4, "rollout__n_samples_per_prompt": 4, "algo__dynamic_filtering_enable": True}
    args = completed({**flags, "algo__allocation__strategy": "uniform"}, 0)
    made = generator(args, 6)
    rejected = [number for number in range(6) if not 0 < sum(a.scores.item() for a in answers(made, number)) < 4]
    batches = [identities(samples) for samples, _ in run(made, episodes=1)]
    assert rejected and {draw for batch in batches for draw, _ in batch} == set(range(6)) - set(rejected)


def answers(made, number):
    order = [row[2][0] for row in loader(made.args, 6)]
    return [answer(SimpleNamespace(number=number, label=order[number]), index) for index in range(4)]


@quiet
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("labels", ["other"], r"draw 0 \(prompt \w+\): a sample came back with the label 'other', not '\d'"),
        ("rewards", None, "the reward function gave no reward for a sample"),
        ("rewards", torch.tensor([float("nan")]), r"the reward of a sample is \[nan\], not one finite number"),
        ("scores", torch.tensor([[0.0, 1.0]]), r"the score of a sample is \[\[0.0, 1.0\]\], not one finite number"),
    ],
)
def test_a_sample_that_is_not_what_was_asked_for_ends_the_run(monkeypatch, name, value, told):
    def spoilt(draw, index):
        made = answer(draw, index)
        setattr(made, name, value)
        return made

    args = completed(
        {"algo__allocation__strategy": "uniform", "rollout__batch_size": 2, "reward__remote_url": ["r.py"]}, 0
    )
    made = generator(args, 4)
    monkeypatch.setattr(Instant, "answered", staticmethod(spoilt))
    with pytest.raises(RuntimeError, match=told):
        made.generate_samples()


@quiet
def test_labels_may_be_lists():
    flags = {"rollout__batch_size": 2, "rollout__n_samples_per_prompt": 3}
    made = generator(completed({"algo__allocation__strategy": "uniform", **flags}, 0), 4)
    dataset = made.prompts_dataloader.loader.dataset
    dataset.labels = [["1", "one"]] * 4
    samples = {one.samples[0] for one in made.generate_samples()[0]}
    assert len(samples) == 6 and {one.group.draw for one in samples} == {0, 1}


@quiet
def test_rewards_of_a_server_come_as_lists_and_of_a_function_in_any_dtype(monkeypatch):
    """JSON gives [1.0] for each sample, NumPy float64."""

    def listed(draw, index):
        made = answer(draw, index)
        made.rewards, made.scores = made.rewards.reshape(1, 1).double(), made.scores.reshape(1, 1)
        made.info = {"reward": made.rewards, "score": made.scores}
        return made

    monkeypatch.setattr(Instant, "answered", staticmethod(listed))
    flags = {"rollout__batch_size": 2, "rollout__n_samples_per_prompt": 3}
    samples, *_ = generator(completed({"algo__allocation__strategy": "uniform", **flags}, 0), 4).generate_samples()
    for one in samples:
        for value in (one.rewards, one.scores, one.info["reward"], one.info["score"]):
            assert value.shape == (1,) and value.dtype == torch.float32
