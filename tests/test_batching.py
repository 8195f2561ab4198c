"""Ragged batches over ranks and micro-batches: nothing lost, no rank idle, no cap exceeded, fillers without weight."""

import threading
from types import SimpleNamespace

import pytest
import torch
from arguments import arguments
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.models import PolicyLoss
from openrlhf.models.utils import masked_mean
from openrlhf.rlvr import batching
from openrlhf.rlvr.batching import RaggedReplayBuffer, cut_to, micro_batches, with_fillers
from openrlhf.rlvr.experience import RaggedExperienceMaker
from openrlhf.rlvr.samples import Group, Sample, checksum
from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences, make_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

LENGTHS = st.lists(st.integers(3, 20), min_size=1, max_size=24)


def sample(number, length):
    """One sample of its own group: a prompt of two tokens, and the response."""
    tokens = torch.arange(length).unsqueeze(0) + 100 * number
    mask = torch.ones(1, length - 1, dtype=torch.long)
    mask[:, 0] = 0
    group = Group(number, f"prompt {number}", "", "", 0, 1, None, 0.0, 0.0)
    return Experience(
        sequences=tokens,
        attention_mask=torch.ones_like(tokens),
        action_mask=mask,
        rollout_log_probs=torch.full((1, length - 1), -0.5),
        prompts=[f"prompt {number}"],
        labels=[str(number)],
        images=[None],
        mm_train_inputs=[None],
        rewards=torch.tensor([float(number)]),
        scores=torch.tensor([1.0]),
        response_length=torch.tensor([length - 2]),
        truncated=torch.tensor([False]),
        total_length=torch.tensor([float(length)]),
        info={"reward": torch.tensor([float(number)])},
        samples=[Sample(group, 0, checksum(tokens), True)],
    )


def samples(lengths):
    return [sample(number, length) for number, length in enumerate(lengths)]


def numbers(experiences):
    """Numbers of the real samples in batches."""
    return sorted(one.group.draw for experience in experiences for one in experience.samples if one)


@given(LENGTHS, st.integers(20, 60), st.integers(1, 4))
def test_no_micro_batch_exceeds_the_cap_and_none_is_empty(lengths, cap, multiple):
    lengths = lengths * multiple  # as many as the multiple needs
    parts = micro_batches(lengths, cap, multiple)
    assert sorted(one for part in parts for one in part) == list(range(len(lengths)))
    assert all(part and sum(lengths[one] for one in part) <= cap for part in parts)
    assert len(parts) % multiple == 0
    fewest = get_minimum_num_micro_batch_size(lengths, cap, 1, 1)
    upstream = get_seqlen_balanced_partitions(lengths, -(-fewest // multiple) * multiple, False)
    if all(sum(lengths[one] for one in part) <= cap for part in upstream):
        assert parts == upstream


@given(LENGTHS, st.integers(20, 60), st.data())
def test_cutting_to_another_ranks_number_keeps_all_and_the_cap(lengths, cap, data):
    parts = micro_batches(lengths, cap)
    count = data.draw(st.integers(len(parts), len(lengths)))
    cut = cut_to(parts, lengths, cap, count)
    assert len(cut) == count and all(cut)
    assert sorted(one for part in cut for one in part) == list(range(len(lengths)))
    assert all(sum(lengths[one] for one in part) <= cap for part in cut)


def test_balancing_alone_would_exceed_the_cap():
    lengths = [3, 3, 2, 2, 2]
    upstream = get_seqlen_balanced_partitions(lengths, get_minimum_num_micro_batch_size(lengths, 6, 1, 1), False)
    assert max(sum(lengths[one] for one in part) for part in upstream) == 7
    assert max(sum(lengths[one] for one in part) for part in micro_batches(lengths, 6)) <= 6


def test_a_sample_longer_than_the_cap_is_refused():
    with pytest.raises(
        ValueError,
        match=r"a sample of 9 tokens exceeds the 8 that a rank takes at once: raise --train.max_tokens_per_gpu",
    ):
        micro_batches([3, 9], 8)


def test_r14_the_number_of_micro_batches_is_rounded_up_to_the_ranks():
    """Five are needed for the cap, and four ranks share them: eight."""
    assert len(micro_batches([10] * 8, 19, 4)) == 8
    assert len(micro_batches([10, 10, 10, 10, 10, 3, 3, 3], 19, 4)) == 8


def maker(args, ranks):
    group = SimpleNamespace(_actor_handlers=[None] * ranks, duplicate_actors=1)
    made = RaggedExperienceMaker(
        group, None, None, None, SimpleNamespace(value=0.0), SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
    )
    return made


FLAGS = {"data__max_len": 20, "train__max_tokens_per_gpu": 40, "rollout__max_tokens_per_gpu": 40}


@given(LENGTHS, st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_every_rank_gets_equally_many_samples_and_batches(lengths, ranks, micro, dynamic):
    args = arguments(
        **FLAGS,
        actor__num_gpus_per_node=ranks,
        train__dynamic_batch_enable=dynamic,
        train__batch_size=2 * ranks,
        rollout__micro_batch_size=micro,
    )
    split = maker(args, ranks).split_rollout_samples(samples(lengths))
    assert numbers(split) == list(range(len(lengths)))
    assert len(split) % ranks == 0
    share = len(split) // ranks
    loads = [sum(len(one.sequences) for one in split[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    if dynamic:  # balanced over the ranks again, before the update
        loads = [len(one.sequences) for one in balance_experiences(split, args)]
        assert numbers(balance_experiences(split, args)) == list(range(len(lengths)))
    assert len(set(loads)) == 1 and len(loads) == ranks
    assert sum(loads) % args.train.batch_size == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_where_batches_are_whole_they_are_upstreams(dynamic):
    lengths = [3, 12, 7, 20, 5, 5, 9, 4, 16, 8, 8, 3, 3, 19, 6, 4]
    args = arguments(
        **FLAGS,
        actor__num_gpus_per_node=1,
        train__dynamic_batch_enable=dynamic,
        train__batch_size=8,
        rollout__micro_batch_size=4,
    )
    ours = maker(args, 1).split_rollout_samples(samples(lengths))
    upstream = RemoteExperienceMaker.split_rollout_samples(maker(args, 1), samples(lengths))
    assert [one.index for one in ours] == [one.index for one in upstream]
    assert all(torch.equal(a.sequences, b.sequences) for a, b in zip(ours, upstream, strict=True))


def test_r13_five_samples_on_four_ranks_are_all_kept():
    args = arguments(actor__num_gpus_per_node=4, train__batch_size=4)
    batches = balance_experiences(with_fillers(samples([9, 5, 7, 3, 4]), 8), args)
    assert numbers(batches) == [0, 1, 2, 3, 4]
    assert [len(one.sequences) for one in batches] == [2, 2, 2, 2]


def test_r15_no_rank_is_left_without_a_micro_batch():
    """Five pieces would come of these samples; four ranks get two each."""
    args = arguments(actor__num_gpus_per_node=4, train__batch_size=4, rollout__micro_batch_size=1)
    assert len(maker(args, 4).split_rollout_samples(samples([5] * 5))) == 8


def test_t02_a_filler_is_in_the_loss_graph_with_weight_zero():
    lengths = [6, 4, 5]
    real = make_experience_batch(split(samples(lengths)))
    filled = make_experience_batch(split(with_fillers(samples(lengths), 4)))
    gradients = []
    for batch in (real, filled):
        log_probs = torch.full(batch.action_mask.shape, -0.4, requires_grad=True)
        loss, clip_ratio, *_ = PolicyLoss()(
            log_probs,
            torch.full(batch.action_mask.shape, -0.5),
            torch.ones(batch.action_mask.shape),
            action_mask=batch.action_mask,
            batch_num_tokens=real.action_mask.sum(),
            global_batch_size=3,
        )
        loss.backward()
        assert torch.isfinite(clip_ratio)
        gradients.append((loss.item(), log_probs.grad))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-6)
    assert torch.equal(gradients[0][1], gradients[1][1][:3])
    assert torch.equal(gradients[1][1][3], torch.zeros(gradients[1][1].shape[1]))


def split(experiences):
    buffer = RaggedReplayBuffer(1)
    for experience in experiences:
        buffer.append(experience)
    return buffer.items


def test_t11_a_batch_of_empty_responses_has_finite_means():
    empty = torch.zeros(2, 3)
    assert masked_mean(torch.ones(2, 3), empty, dim=-1).tolist() == [0, 0]
    assert masked_mean(torch.ones(2, 3), empty).item() == 0


def test_a_sample_whose_tokens_changed_on_the_way_is_refused():
    changed = sample(3, 7)
    changed.sequences[0, 4] += 1
    with pytest.raises(RuntimeError, match=r"sample 0 of draw 3 \(prompt prompt 3\) .* other tokens"):
        RaggedReplayBuffer(1).append(changed)


@given(st.lists(st.integers(3, 20), min_size=16, max_size=16), st.integers(20, 40))
def test_t01_ranks_make_equally_many_steps_whatever_their_samples(lengths, cap):
    """Two ranks of eight samples, two updates of eight samples in all, run as threads that meet in every collective."""
    args = arguments(train__batch_size=8, train__max_tokens_per_gpu=cap)
    barrier, board = threading.Barrier(2), {}

    def reduced(values, operation, group):
        board[group] = values
        barrier.wait()
        pairs = list(zip(board[0], board[1], strict=True))
        barrier.wait()
        return [float(max(pair) if operation is batching.dist.ReduceOp.MAX else sum(pair)) for pair in pairs]

    buffers = [RaggedReplayBuffer(1, dynamic_batch=True) for _ in range(2)]

    def plan(rank):
        mesh = {"dp": SimpleNamespace(get_group=lambda: rank)}
        for number in range(8):
            buffers[rank].append(sample(number, lengths[8 * rank + number]))
        buffers[rank].setup_dynamic_batch(SimpleNamespace(args=args, ds_device_mesh=mesh))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batching, "_reduced", reduced)
        patched.setattr(batching.dist, "get_world_size", lambda group: 2)
        threads = [threading.Thread(target=plan, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    first, second = buffers
    assert len(first) == len(second) and first.dynamic_optimizer_step == second.dynamic_optimizer_step
    assert sum(first.dynamic_optimizer_step) == 2 and first.dynamic_optimizer_step[-1] == 1
    assert first.dynamic_batch_num_tokens == second.dynamic_batch_num_tokens
    for buffer in buffers:
        assert sorted(one for part in buffer.dynamic_indices for one in part) == list(range(8))
        for part in buffer.dynamic_indices:
            assert sum(int(buffer.items[one].total_length) for one in part) <= cap
    steps = [
        sum(lengths[rank * 8 + one] - 2 for rank in range(2) for one in range(4 * step, 4 * step + 4))
        for step in (0, 1)
    ]
    assert sorted(set(first.dynamic_batch_num_tokens)) == sorted({float(step) for step in steps})
