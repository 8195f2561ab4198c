"""Identities of prompts: stable, unique unless merged, from a column or from prompt and label."""

from types import SimpleNamespace

import datasets
import pytest
from arguments import arguments

from openrlhf.rlvr.prompts import IdentifiedPrompts, RaggedPromptSource, ragged_datasets, training_prompts


def prompts(rows, **flags):
    flags = {"algo__allocation__strategy": "dynamic", "data__label_key": "label", **flags}
    strategy = SimpleNamespace(args=arguments(**flags), is_rank_0=lambda: False)
    return IdentifiedPrompts(datasets.Dataset.from_list(rows), None, strategy)


ROWS = [{"input": "1+1=?", "label": "2", "key": "a"}, {"input": "2+2=?", "label": "4", "key": "b"}]


def test_an_identity_follows_from_prompt_and_label_wherever_the_row_stands():
    first, second = prompts(ROWS).ids
    assert first != second
    assert prompts(ROWS[::-1]).ids == [second, first]
    assert prompts([{**ROWS[0], "label": "3"}]).ids != [first]


def test_a_column_can_hold_the_identities():
    found = prompts([{**ROWS[0], "key": 7}, {**ROWS[1], "key": 8}], data__id_key="key")
    assert found.ids == ["7", "8"]
    assert found.collate_fn([found[1]])[-1] == ["8"]


def test_a_missing_column_or_id_is_told():
    with pytest.raises(ValueError, match=r"id_key uid: no such column in the prompts; they have input, label, key"):
        prompts(ROWS, data__id_key="uid")
    with pytest.raises(ValueError, match=r"--data.id_key key: row 2 of the prompts has none \(1 in all\)"):
        prompts([ROWS[0], {**ROWS[1], "key": None}], data__id_key="key")


def test_duplicates_are_refused_with_their_rows_or_merged():
    doubled = [*ROWS, ROWS[0]]
    with pytest.raises(ValueError, match="rows 1 and 3 have the same prompt and label"):
        prompts(doubled)
    with pytest.raises(ValueError, match="rows 1 and 2 have the same id in column key"):
        prompts([ROWS[0], {**ROWS[1], "key": "a"}], data__id_key="key")
    merged = prompts(doubled, algo__allocation__duplicates="merge")
    assert merged.ids[0] == merged.ids[2]


def test_without_our_flags_the_prompts_and_their_source_are_upstreams():
    upstream = SimpleNamespace
    strategy = SimpleNamespace(args=arguments())
    assert training_prompts(lambda *args, **kwargs: upstream, [], None, strategy) is upstream
    assert ragged_datasets(lambda *args: ("source", None, 7), None, strategy, None) == ("source", None, 7)


@pytest.mark.parametrize(("rows", "steps"), [(16, 2 * 2 * 2), (20, 2 * (2 * 2 + 1))])
def test_the_schedule_counts_the_last_batch_of_an_episode(rows, steps):
    """Batches of 8 prompts with 4 samples each in updates of 16; two episodes."""
    args = arguments(
        algo__allocation__strategy="uniform",
        rollout__batch_size=8,
        rollout__n_samples_per_prompt=4,
        train__batch_size=16,
        train__num_episodes=2,
    )
    source = type("Source", (), {"loader": range(rows), "__len__": lambda self: rows})()
    made, _, counted = ragged_datasets(lambda *args: (source, None, 0), None, SimpleNamespace(args=args), None)
    assert isinstance(made, RaggedPromptSource) and counted == steps


def test_a_checkpoint_without_statistics_is_refused():
    source = RaggedPromptSource(SimpleNamespace(load_state_dict=lambda state: None), 1.0)
    with pytest.raises(ValueError, match=r"written without --algo.allocation and the fork's"):
        source.load_state_dict({"loader": {}, "draws": 3, "at_end": False})


def test_a_checkpoint_of_other_data_is_refused():
    def source(prompts):
        loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        made = type("Source", (RaggedPromptSource,), {"__len__": lambda self: prompts})
        return made(loader, 1.0)

    with pytest.raises(ValueError, match=r"written with 20 prompts in --data.prompt_dataset, and there are 8"):
        source(8).load_state_dict(source(20).state_dict())


def test_images_are_part_of_an_identity():
    rows = [{"input": "Which one?", "label": "A", "images": [name]} for name in ("a.png", "b.png")]
    assert len(set(prompts(rows).ids)) == 2
    with pytest.raises(ValueError, match=r"name a column that tells them apart by --data.id_key"):
        prompts([rows[0], rows[0]])
