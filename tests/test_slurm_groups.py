"""Where the samples went: read from the records of groups, told by source, drawn over steps and by difficulty."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slurm.config import Config
from slurm.groups import Group, budget, by_difficulty, last_third, read_updates, shares
from slurm.plot import SOURCES
from slurm.report import as_markdown, write_report
from slurm.run_folder import RunFolder, create_run


def row(source: str, count: int, correct: int, seen: float = 8, right: float = 4, **changed: Any) -> dict[str, Any]:
    rewards = [1.0] * correct + [0.0] * (count - correct)
    mean = correct / count
    group = {"draw": 1, "prompt_id": "p", "source": source, "seen": seen, "right": right, "weight": 0.2}
    group |= {"count": count, "correct": correct, "rewards": rewards}
    return group | {"advantages": [reward - mean for reward in rewards]} | changed


def line(step: int, *groups: dict[str, Any]) -> str:
    return json.dumps({"step": step, "time": 1.0, "groups": groups}) + "\n"


def read(tmp_path: Path, text: str) -> dict[int, Sequence[Group]]:
    path = tmp_path / "updates.jsonl"
    path.write_text(text)
    return dict(read_updates(path))


def test_groups_are_read_with_what_was_known_before_the_draw(tmp_path: Path) -> None:
    rows = [
        row("easy", 4, 3, seen=8, right=2),
        row("hard", 6, 0, seen=0, right=0, weight=None),
        row("hard", 6, 6, seen=2, right=1, weight=None),
        row("hard", 1, 1, seen=4, right=0, weight=0.0),
        row("hard", 2, 1, advantages=[0.5, 0.5]),
        row("hard", 2, 1) | {"correct": None},
    ]
    assert read(tmp_path, line(1, *rows))[1] == [
        Group("easy", 0.25, 4, 3, taught=True),
        Group("hard", None, 6, 0, taught=False),
        Group("hard", None, 6, 6, taught=False),
        Group("hard", 0.0, 1, 1, taught=False),
        Group("hard", 0.5, 2, 1, taught=False),
        Group("hard", 0.5, 2, None, taught=True),
    ]
    assert read_updates(tmp_path / "missing.jsonl") == {}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(0, 400))
def test_an_attempt_replaces_all_steps_from_its_first_one_on(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int
) -> None:
    lines = [line(step, row("any", number + 1, 0)) for number, step in enumerate(steps)]
    half = line(6, row("any", 99, 0))[: -1 - cut]
    read_steps = read(tmp_path_factory.mktemp("groups"), "".join(lines) + half * bool(cut))
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last = {earlier: count for earlier, count in last.items() if earlier < step} | {step: number + 1}
    assert list(read_steps) == list(last)
    assert {step: groups[0].count for step, groups in read_steps.items()} == last


@pytest.mark.parametrize("text", ["null", "[]", "3", '{"step": 1}', '{"step": 1, "groups": [{}]}', line(1).strip()])
def test_a_line_without_groups_is_left_out(tmp_path: Path, text: str) -> None:
    assert list(read(tmp_path, text + "\n" + line(2, row("any", 1, 0)))) == [2]


def test_the_budget_is_told_by_source_the_easiest_first(tmp_path: Path) -> None:
    text = line(1, row("hard", 12, 3), row("easy", 4, 4)) + line(2, row("hard", 8, 0), row("easy", 8, 7))
    spent = budget(read(tmp_path, text))
    assert list(spent["by_source"]) == ["easy", "hard"]
    assert spent["by_source"]["hard"] == {
        "prompts": 2,
        "samples": 20,
        "samples_per_prompt": 10.0,
        "share_right": 3 / 20,
        "share_taught": 12 / 20,
    }
    assert (spent["prompts"], spent["samples"], spent["share_right"], spent["share_taught"]) == (
        4,
        32,
        14 / 32,
        20 / 32,
    )
    assert budget({}) == {}


groups = st.builds(
    Group,
    source=st.sampled_from("abc"),
    share_right=st.none() | st.floats(0, 1),
    count=st.integers(1, 24),
    correct=st.just(0),
    taught=st.booleans(),
)
updates = st.dictionaries(st.integers(1, 9), st.lists(groups, min_size=1, max_size=9), min_size=1, max_size=9)


@given(updates)
def test_sources_share_every_step_and_the_whole_without_remainder(steps: dict[int, list[Group]]) -> None:
    spent = budget(steps)
    for part in "prompts", "samples":
        assert sum(one[part] for one in spent["by_source"].values()) == spent[part]
    of_samples = shares(steps, list("abc"), lambda group: group.count)
    assert [sum(step) for step in zip(*of_samples, strict=True)] == pytest.approx([1.0] * len(steps))
    first = next(iter(steps.values()))
    assert of_samples[0][0] == pytest.approx(
        sum(group.count for group in first if group.source == "a") / sum(group.count for group in first)
    )


@given(st.lists(groups, max_size=40), st.integers(1, 12))
def test_bins_of_difficulty_hold_every_draw_with_a_history_once(drawn: list[Group], bins: int) -> None:
    known = [group for group in drawn if group.share_right is not None]
    found = list(by_difficulty(drawn, bins))
    assert len(found) <= bins and bool(found) == bool(known)
    assert [each.share_right for each in found] == sorted(each.share_right for each in found)
    for each in found:
        assert each.low <= each.high
        assert min(group.count for group in known) <= each.mean <= max(group.count for group in known)
    (whole,) = by_difficulty(known, 1) if known else [None]
    if whole:
        assert whole.mean == pytest.approx(sum(group.count for group in known) / len(known))


def test_the_band_of_a_bin_leaves_a_tenth_out_on_either_side() -> None:
    drawn = [Group("a", 0.5, count, 0, True) for count in range(1, 12)]
    (each,) = by_difficulty(drawn)
    assert (each.share_right, each.mean, each.low, each.high) == (0.5, 6.0, 2, 10)


@pytest.mark.parametrize(("steps", "first"), [(1, 1), (2, 2), (3, 3), (6, 5), (100, 68)])
def test_the_last_third_is_of_steps(steps: int, first: int) -> None:
    found = last_third({step: [Group("a", None, step, 0, True)] for step in range(1, steps + 1)})
    assert [group.count for group in found] == list(range(first, steps + 1))
    assert last_third({}) == []


def recorded(sources: Sequence[str], steps: int, seen: float = 8) -> str:
    def of(number: int, step: int) -> dict[str, Any]:
        count = 4 + number % 9
        known = {"seen": seen, "right": seen * ((number + step) % 9) / 8} if seen else {"seen": 0, "weight": None}
        return row(sources[number % len(sources)], count, count // 2, **known)

    return "".join(line(step, *(of(number, step) for number in range(18))) for step in range(1, steps + 1))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = create_run(tmp_path, "toy", Config("toy", {}), [], {})
    folder.groups.mkdir()
    return folder


def panels(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> dict[str, Axes]:
    """The axes of the report's plot by title."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **named: (figures.append(self), save(self, *given)))
    write_report(run)
    assert run.curves.stat().st_size > 1000
    return {axes.get_title(): axes for axes in figures[-1].axes}


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_budget_is_drawn_as_shares_of_its_sources(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.updates.write_text(recorded(["ones", "a name of many letters"], steps=30))
    drawn = panels(run, monkeypatch)
    assert len(drawn) == 8
    went = drawn["Where the budget went"]
    assert sorted(went.get_legend_handles_labels()[1]) == ["a name of man…", "ones"]
    assert went.get_ylim() == (0, 1)
    difficulty = drawn["Samples by difficulty"]
    assert difficulty.get_legend_handles_labels()[1] == ["mean, 80 % band", "if equal: 8"]
    assert words(went) == words(difficulty) == []


@pytest.mark.parametrize("sources", [1, SOURCES + 1])
def test_with_one_source_or_too_many_the_counts_are_drawn(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, sources: int
) -> None:
    run.updates.write_text(recorded([f"source {number}" for number in range(sources)], steps=5))
    went = panels(run, monkeypatch)["Where the budget went"]
    assert went.get_legend_handles_labels()[1] == ["range", "mean"]
    (mean,) = went.lines
    assert list(mean.get_ydata()) == [8.0] * 5


def test_without_records_or_without_a_history_the_panels_say_so(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = panels(run, monkeypatch)
    assert words(drawn["Where the budget went"]) == words(drawn["Samples by difficulty"]) == ["not recorded"]
    run.updates.write_text(recorded(["ones", "tens"], steps=1, seen=0))
    drawn = panels(run, monkeypatch)
    assert words(drawn["Where the budget went"]) == []
    assert words(drawn["Samples by difficulty"]) == ["no prompt had a history"]


def test_no_legend_covers_data(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"reward": 0.5, "accuracy": 0.25, "eval_a_pass1": 0.5}
    rows = [
        {"kind": kind, "step": step, "time": 1.0, "metrics": metrics} for step in (1, 2) for kind in ("train", "eval")
    ]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    run.updates.write_text(recorded([f"a long name {number}" for number in range(SOURCES)], steps=9))
    drawn = panels(run, monkeypatch)
    with_legend = [axes for axes in drawn.values() if axes.get_legend()]
    assert len(with_legend) == 4
    boxes = [axes.get_window_extent() for axes in drawn.values()]
    assert not [box for axes in with_legend for box in boxes if axes.get_legend().get_window_extent().overlaps(box)]


def test_the_summary_tells_the_budget_only_where_it_was_recorded(run: RunFolder) -> None:
    summary = write_report(run)
    assert summary["budget"] == {} and "budget" not in as_markdown(summary)
    run.updates.write_text(line(1, row("hard", 12, 3), row("easy", 4, 4)) + line(2, row("hard", 7, 0)))
    summary = write_report(run)
    assert json.loads(run.summary_json.read_text())["budget"] == summary["budget"]
    text = run.summary_text.read_text()
    assert "| budget | prompts drawn | samples | a prompt | right | taught |" in text
    assert "| easy | 1 | 4 | 4.0 | 100.0 % | 0.0 % |\n| hard | 2 | 19 | 9.5 | 15.8 % | 63.2 % |" in text
    assert "| **all** | 3 | 23 | 7.7 | 30.4 % | 52.2 % |" in text
    run.updates.write_text(line(1, row("a", 8, 3) | {"correct": None}, row("b", 4, 4)))
    assert [row["share_right"] for row in write_report(run)["budget"]["by_source"].values()] == [1.0, None]
    assert "| a | 1 | 8 | 8.0 |  | 100.0 % |\n| **all** | 2 | 12 | 6.0 |  | 66.7 % |" in run.summary_text.read_text()
