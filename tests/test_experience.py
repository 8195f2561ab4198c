"""Advantages in batches: upstream's bit for bit where all groups have one size, and sound where they have not."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from arguments import arguments
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from openrlhf.rlvr.advantages import group_advantages
from openrlhf.rlvr.experience import RaggedExperienceMaker, at_step
from openrlhf.rlvr.samples import Group, Sample, checksum
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

# Upstream tells of penalties in its log, which hypothesis would print for every example.
logging.getLogger("openrlhf.trainer.ppo_utils.length_penalty").setLevel(logging.WARNING)

UPSTREAM = ["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce", "flash_reinforce", "gae"]


def samples(counts, rewards, seed):
    """Samples of groups of these sizes, with responses of 1 to 6 tokens after a prompt of two."""
    torch.manual_seed(seed)
    made, rewards = [], iter(rewards)
    for draw, count in enumerate(counts):
        group = Group(draw, f"prompt {draw}", "", "", 0, count, None, 0.0, 0.0)
        for number in range(count):
            length = int(torch.randint(1, 7, ()))
            tokens = torch.randint(5, 90, (1, 2 + length))
            mask = torch.ones(1, 1 + length)
            mask[:, 0] = 0
            reward = torch.tensor([next(rewards)], dtype=torch.float32)
            made.append(
                Experience(
                    sequences=tokens,
                    attention_mask=torch.ones_like(tokens),
                    action_mask=mask,
                    rewards=reward,
                    kl=torch.randn(1, 1 + length) * 0.1,
                    values=torch.randn(1, 1 + length),
                    response_length=torch.tensor([length]),
                    truncated=torch.tensor([length == 6]),
                    total_length=torch.tensor([2.0 + length]),
                    info={"reward": reward.clone()},
                    samples=[Sample(group, number, checksum(tokens), bool(reward > 0.5))],
                )
            )
    return made


def made(kind, experiences, kl=0.05, **flags):
    """Advantages by a maker of this kind, after the samples went into micro-batches."""
    args = arguments(actor__num_gpus_per_node=1, rollout__micro_batch_size=3, data__max_len=64, **flags)
    actor = SimpleNamespace(_actor_handlers=[None], duplicate_actors=1)
    parts = SimpleNamespace(value=kl), SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
    maker = kind(actor, None, None, None, *parts)
    return maker.compute_advantages_and_returns(maker.split_rollout_samples(copy.deepcopy(experiences)))


REWARDS = st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.25, 0.1, 0.7]), min_size=12, max_size=12)


@pytest.mark.parametrize("estimator", UPSTREAM)
@settings(max_examples=25)
@given(rewards=REWARDS, seed=st.integers(0, 99), dynamic=st.booleans(), penalised=st.booleans())
def test_groups_of_one_size_have_upstreams_numbers_bit_for_bit(estimator, rewards, seed, dynamic, penalised):
    for first in range(0, 12, 4):  # no group of equal rewards: there upstream magnifies rounding noise
        rewards[first : first + 2] = [0.0, 1.0]
    flags = {
        "algo__advantage__estimator": estimator,
        "rollout__n_samples_per_prompt": 4,
        "train__batch_size": 12,
        "train__dynamic_batch_enable": dynamic,
        "rollout__max_tokens_per_gpu": 20,
    }
    if penalised:
        flags |= {
            "rollout__max_new_tokens": 6,
            "reward__overlong_buffer_len": 3,
            "reward__stop_properly_penalty_coef": 0.5,
        }
    experiences = samples([4, 4, 4], rewards, seed)
    ours, upstream = (made(kind, experiences, **flags) for kind in (RaggedExperienceMaker, RemoteExperienceMaker))
    # Upstream's balancing sometimes exceeds the cap; ours never does, with other micro-batches.
    assume(not dynamic or all(one.attention_mask.sum() <= 20 for one in upstream))
    for one, other in zip(ours, upstream, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        for name in ("advantages", "returns", "rewards"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert one.info.keys() == other.info.keys()
        assert all(torch.equal(one.info[name], other.info[name]) for name in one.info)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 99), st.booleans())
def test_ragged_groups_get_their_own_advantages_in_any_micro_batches(counts, seed, dynamic):
    """Each token of a sample has the sample's advantage, fillers and a KL coefficient of 0 notwithstanding."""
    torch.manual_seed(seed)
    rewards = torch.randint(0, 2, (sum(counts),)).float()
    found = made(
        RaggedExperienceMaker,
        samples(counts, rewards.tolist(), seed),
        kl=0.0,
        algo__advantage__estimator="reward_budget",
        train__batch_size=8,
        train__dynamic_batch_enable=dynamic,
        rollout__max_tokens_per_gpu=20,
    )
    ids = torch.tensor([draw for draw, count in enumerate(counts) for _ in range(count)])
    expected = iter(group_advantages(rewards, ids, "reward_budget").tolist())
    wanted = {(draw, number): next(expected) for draw, count in enumerate(counts) for number in range(count)}
    for experience in found:
        for row, one in enumerate(experience.samples):
            mask, advantages = experience.action_mask[row].bool(), experience.advantages[row]
            assert torch.isfinite(advantages).all()
            if one is None:
                assert not mask.any()
            else:
                value = wanted.pop((one.group.draw, one.number))
                assert torch.allclose(advantages[mask], torch.tensor(value), atol=1e-6)
    assert not wanted


def masks(**flags):
    """Response tokens in the loss of a group that all got right, and of one that half got right."""
    experiences = samples([2, 2], [1.0, 1.0, 0.0, 1.0], 0)
    found = made(RaggedExperienceMaker, experiences, train__batch_size=4, **flags)
    tokens = {0: 0, 1: 0}
    for experience in found:
        for row, one in enumerate(experience.samples):
            tokens[one.group.draw] += int(experience.action_mask[row].sum())
    lengths = [sum(int(one.response_length) for one in experiences[first : first + 2]) for first in (0, 2)]
    return tokens, lengths


def test_t03_a_group_without_variance_leaves_the_normaliser_only_when_asked():
    tokens, lengths = masks(algo__advantage__estimator="reward_budget")
    assert [tokens[0], tokens[1]] == lengths
    dropping = {"algo__advantage__estimator": "reward_budget", "algo__advantage__drop_zero_variance": True}
    tokens, lengths = masks(**dropping)
    assert [tokens[0], tokens[1]] == [0, lengths[1]]


def test_a_batch_of_nothing_but_equal_rewards_is_kept_whole():
    found = made(
        RaggedExperienceMaker,
        samples([3], [1.0, 1.0, 1.0], 0),
        kl=0.0,
        algo__advantage__estimator="group_norm",
        algo__advantage__drop_zero_variance=True,
        train__batch_size=3,
    )
    assert all(one.action_mask.any() and not one.advantages.any() for one in found)


def with_entropy(step, steps=None, **flags):
    """A maker's experience at a training step, of samples whose responses have mean entropies 1, 2, 3 and 4."""
    experiences = samples([2, 2], [0.0, 1.0, 1.0, 1.0], 0)
    for nats, one in enumerate(experiences, start=1):
        one.info["entropy"] = torch.tensor([float(nats)])
    kept = {"train__batch_size": 4, "algo__advantage__estimator": "dr_grpo", **flags}
    args = arguments(
        actor__num_gpus_per_node=1,
        algo__entropy_reward__coef=0.01,
        algo__entropy_reward__steps=steps,
        rollout__micro_batch_size=4,
        **kept,
    )
    actor = SimpleNamespace(_actor_handlers=[None], duplicate_actors=1)
    parts = SimpleNamespace(value=0.0), SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
    maker = at_step(RaggedExperienceMaker(actor, None, None, None, *parts), step)
    maker.compute_advantages_and_returns(maker.split_rollout_samples(experiences))
    return maker._batch


@pytest.mark.parametrize("step", [1, 500])
def test_a_sample_is_rewarded_for_the_entropy_of_its_response(step):
    batch = with_entropy(step, steps=500)
    assert batch.verified.tolist() == [0, 1, 1, 1]
    assert batch.shaped.tolist() == pytest.approx([0.01, 1.02, 1.03, 1.04])
    assert batch.values.tolist() == pytest.approx([-0.505, 0.505, -0.005, 0.005], abs=1e-6)


def test_the_reward_for_entropy_ends_with_its_schedule():
    assert with_entropy(501, steps=500).shaped.tolist() == [0, 1, 1, 1]
    assert with_entropy(10_000).shaped.tolist() == pytest.approx([0.01, 1.02, 1.03, 1.04])


def test_reward_budgeting_shares_verified_rewards_and_adds_entropy_to_the_advantages():
    values = with_entropy(1, algo__advantage__estimator="reward_budget").values
    shared = group_advantages(torch.tensor([0.0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), "reward_budget")
    assert (values - shared).tolist() == pytest.approx([0.01, 0.02, 0.03, 0.04], abs=1e-6)


@pytest.mark.parametrize(("kl", "name", "expected"), [(0.0, "groups/advantage_gap", 1), (0.1, "groups/sharpness", 10)])
def test_the_gap_between_right_and_wrong_is_told_over_groups_with_both(kl, name, expected):
    args = arguments(actor__num_gpus_per_node=1, algo__advantage__estimator="dr_grpo", train__batch_size=5)
    actor = SimpleNamespace(_actor_handlers=[None], duplicate_actors=1)
    parts = SimpleNamespace(value=kl), SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
    maker = RaggedExperienceMaker(actor, None, None, None, *parts)
    experiences = samples([3, 2], [0.0, 1.0, 1.0, 1.0, 1.0], 0)
    maker.compute_advantages_and_returns(maker.split_rollout_samples(experiences))
    metrics = maker._metrics(maker._batch)
    assert metrics[name] == pytest.approx(expected)
    assert ("groups/sharpness" in metrics) == (kl > 0) != ("groups/advantage_gap" in metrics)
