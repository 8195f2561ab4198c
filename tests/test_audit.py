"""The audit derives a run again from its records, and finds every kind of record that does not follow."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from test_sampling import Instant, completed, generator, quiet

from openrlhf.rlvr.audit import audit, rank_correlation, spread
from openrlhf.rlvr.experience import RaggedExperienceMaker

pytestmark = quiet
FLAGS = {
    "algo__allocation__strategy": "dynamic",
    "rollout__batch_size": 4,
    "rollout__n_samples_per_prompt": 4,
    "algo__dynamic_filtering_enable": True,
    "algo__allocation__min_history": 2,
    "algo__allocation__decay": 0.5,
    "algo__advantage__estimator": "reward_budget",
    "train__batch_size": 8,
    "actor__num_gpus_per_node": 1,
    "data__max_len": 64,
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Records of two episodes of eighteen prompts, made by the modules that make them in a run."""
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("openrlhf.repeat.samples.ray.put", lambda value: value)
        args = completed({**FLAGS, "logger__groups_path": str(folder)}, 2)
        made: Instant = generator(args, 18)
        actor = SimpleNamespace(_actor_handlers=[None], duplicate_actors=1)
        parts = SimpleNamespace(value=0.0), SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
        maker = RaggedExperienceMaker(actor, None, None, None, *parts)
        trainer = SimpleNamespace(_compute_rollout_stats=lambda experiences: {})
        step = 0
        for _ in range(2):
            ended = False
            while not ended:
                samples, _, _, ended = made.generate_samples()
                if samples:
                    step += 1
                    experiences = maker.split_rollout_samples([prepared(one) for one in samples])
                    maker.tell(trainer, maker.compute_advantages_and_returns(experiences), step)
    return folder


def prepared(sample):
    """What the trainer reads of a sample beside its tokens and verdict."""
    sample.attention_mask = torch.ones_like(sample.sequences)
    sample.action_mask = torch.tensor([[0.0, 1.0]])
    sample.kl = torch.zeros(1, 2)
    sample.response_length, sample.truncated = torch.tensor([1]), torch.tensor([False])
    sample.total_length = torch.tensor([3.0])
    sample.info = {"reward": sample.rewards.clone()}
    return sample


def test_what_the_modules_record_follows_from_itself(records):
    assert audit(records) == []
    settings, *draws = [json.loads(line) for line in (records / "draws.jsonl").read_text().splitlines()]
    assert settings["average"] == 4 and len({row["count"] for row in draws}) > 2
    assert any(row["replaces"] is not None for row in draws) and not all(row["accepted"] for row in draws)


def changed(row, **values):
    return {**row, **values}


def one_more(row):
    return changed(row, count=row["count"] + 1, scores=[*row["scores"], 0.0])


def first_of(groups, **values):
    return [{**groups[0], **values}, *groups[1:]]


TAMPERED = {
    "another number of samples": ("draws.jsonl", -2, one_more, "samples, "),
    "a verdict turned": (
        "draws.jsonl",
        3,
        lambda row: changed(row, scores=[1.0 - row["scores"][0], *row["scores"][1:]]),
        "not what was verified",
    ),
    "a sample missing": ("draws.jsonl", 5, lambda row: changed(row, scores=row["scores"][1:]), "samples came of"),
    "another prompt": ("draws.jsonl", 2, lambda row: changed(row, prompt_id="x"), "not what was verified"),
    "an advantage changed": (
        "updates.jsonl",
        1,
        lambda row: changed(row, groups=first_of(row["groups"], advantages=[9.0] * row["groups"][0]["count"])),
        "an advantage that does not follow",
    ),
    "a group learnt under another draw": (
        "updates.jsonl",
        1,
        lambda row: changed(row, groups=first_of(row["groups"], draw=row["groups"][1]["draw"])),
        "times",
    ),
    "a step lost": ("updates.jsonl", 1, lambda row: None, "accepted and never learnt"),
}


@pytest.mark.parametrize(("name", "place", "change", "told"), TAMPERED.values(), ids=TAMPERED)
def test_a_record_that_does_not_follow_is_told(records, tmp_path, name, place, change, told):
    for file in ("draws.jsonl", "updates.jsonl"):
        rows = [json.loads(line) for line in (records / file).read_text().splitlines()]
        if file == name:
            rows[place] = change(rows[place])
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows if row))
    assert any(told in fault for fault in audit(tmp_path)), audit(tmp_path)


def test_a_resumed_attempt_replaces_what_came_after_its_checkpoint(records, tmp_path):
    """The first attempt was killed while it wrote; the second began at call 3 and did the rest again."""
    rows = (records / "draws.jsonl").read_text().splitlines(keepends=True)
    settings, draws = json.loads(rows[0]), rows[1:]
    early = [row for row in draws if json.loads(row)["call"] < 3]
    lost = [row.replace('"count": ', '"count": 1') for row in draws if json.loads(row)["call"] == 3]
    again = [json.dumps({**settings, "call": 3}) + "\n", *(row for row in draws if json.loads(row)["call"] >= 3)]
    (tmp_path / "draws.jsonl").write_text("".join([rows[0], *early, *lost, draws[0][:30] + "\n", *again]))
    updates = (records / "updates.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "updates.jsonl").write_text("".join([*updates[:3], *updates]))
    assert audit(tmp_path) == []


def test_the_spread_is_that_of_the_last_draws_within_their_bounds():
    """Two batches; an early draw, numbers at the bounds and prompts without weight do not count."""
    settings = {"average": 4, "min_samples": 2, "max_samples": 9}

    def row(prompt_id, count, weight, batch):
        return {"prompt_id": prompt_id, "count": count, "weight": weight, "call": 0, "batch": batch}

    first = [row("a", 8, 0.9, 0)]
    last = [row("a", 3, 0.1, 1), row("b", 4, 0.2, 1), row("c", 5, 0.3, 1), row("d", 9, 0.0, 1), row("e", 4, None, 1)]
    other = [row("f", 7, 0.1, 2), row("g", 5, 0.2, 2), row("h", 3, 0.3, 2)]
    assert spread([(settings, first), (settings, [*last, *other])]) == (pytest.approx(6 / 8), pytest.approx(0.0))


def test_rank_correlation_with_ties():
    """By hand: ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4."""
    assert rank_correlation([0, 5, 5, 9], [1, 7, 3, 8]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))
