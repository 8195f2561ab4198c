"""Comparisons of runs: numbers by hand, what belongs together, what is left out, and words that claim no more."""

import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from slurm.__main__ import main
from slurm.compared_runs import differing, group_of, read_run, read_runs
from slurm.comparison import verdict, write_comparison
from slurm.comparison_numbers import accuracy_at, common_counts, compare, mean_over_samples
from slurm.config import Config, Setting
from slurm.draws import generated_by_step
from slurm.run_folder import RunFolder, create_run


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_run(
    runs: Path,
    name: str,
    seed: int,
    accuracies: Mapping[int, float],
    samples: int = 100,
    started: float = 1000.0,
    sha256: str = "0" * 64,
    **settings: Any,
) -> RunFolder:
    """A finished run whose every step learns from `samples` samples, of which it says that half taught something."""
    given = {"train.seed": seed, **{key.replace("__", "."): value for key, value in settings.items()}}
    config = Config(name, {key: Setting(value, "here") for key, value in given.items()})
    data = {"eval.dataset": [{"by_source": {"a": 4}, "sha256": sha256}]}
    run = create_run(runs, name, config, [], {"data": data})
    run.new_attempt().note(started=started, ended=started + 1, outcome="finished")
    metrics = {"rollout/num_samples": samples, "groups/effective_samples": samples / 2}
    rows = [{"kind": "train", "step": step, "time": 1.0, "metrics": metrics} for step in range(1, max(accuracies) + 1)]
    rows += [
        {"kind": "eval", "step": step, "time": 1.0, "metrics": {"eval_a_pass1": value}}
        for step, value in accuracies.items()
    ]
    run.metrics.write_text(lines(rows))
    return run


def compared(*runs: RunFolder) -> dict[str, Any]:
    found, left_out = read_runs([run.root for run in runs])
    assert not left_out
    return compare(found)


def test_means_and_standard_errors_are_those_of_the_seeds(tmp_path: Path) -> None:
    summary = compared(*(make_run(tmp_path, "a", seed, {0: 0.1, 3: 0.3 + seed / 10}) for seed in (1, 2, 3)))
    (group,) = summary["groups"].values()
    assert group["seeds"] == [1, 2, 3]
    assert group["samples"] == {"mean": 300, "error": 0, "runs": 3}
    assert group["before"] == {"mean": pytest.approx(0.1), "error": pytest.approx(0), "runs": 3}
    assert group["after"] == {"mean": pytest.approx(0.5), "error": pytest.approx(0.1 / math.sqrt(3)), "runs": 3}
    assert group["gain_points"]["mean"] == pytest.approx(40)
    assert group["gain_points"]["error"] == pytest.approx(10 / math.sqrt(3))
    assert group["area"]["mean"] == pytest.approx(0.3)
    assert group["at"][-1] == group["after"]
    assert summary["difference"] is None
    assert [one["effective"] for one in summary["runs"]] == [[[1, 100, 0.5], [2, 200, 0.5], [3, 300, 0.5]]] * 3


def test_convergence_is_told_of_the_seeds_that_converged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = range(0, 501, 25)
    rising = {step: 0.2 + 0.001 * step for step in steps}
    settling = {step: 0.2 + 0.4 * (1 - math.exp(-step / 50)) for step in steps}
    runs = [
        make_run(tmp_path, "a", 1, settling),
        make_run(tmp_path, "a", 2, rising),
        make_run(tmp_path, "a", 3, {1: 1}),
    ]
    summary = compared(*runs)
    found = summary["runs"][0]["convergence"]["step"]
    assert 100 < found < 250
    assert summary["groups"]["a"]["convergence"] == {"mean": found, "error": None, "runs": 1, "of": 2}
    assert main(["report", *(str(run.root) for run in runs)]) == 0
    told = capsys.readouterr().out
    assert (
        "| converged at step |" in told
        and f"| {found:.0f} (1 of 2) |" in told
        and "with 12 evaluations or more" in told
    )


def test_the_area_is_of_trapezoids_and_lines_join_evaluations() -> None:
    curve = [(0.0, 0.1), (100.0, 0.3), (300.0, 0.5)]
    assert mean_over_samples(curve, 0, 300) == pytest.approx((100 * 0.2 + 200 * 0.4) / 300)
    assert mean_over_samples(curve, 50, 200) == pytest.approx((50 * 0.25 + 100 * 0.35) / 150)
    assert accuracy_at(curve, 200) == pytest.approx(0.4)
    assert (accuracy_at(curve, 0), accuracy_at(curve, 300)) == (0.1, 0.5)
    assert accuracy_at(curve, -1) is accuracy_at(curve, 301) is mean_over_samples(curve, 0, 301) is None
    assert mean_over_samples(curve[:1], 0, 0) is None


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=2, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_mean_over_samples_lies_between_the_extremes_and_joins_at_any_place(
    steps: list[tuple[int, float]], where: float, then: float
) -> None:
    curve = [(float(sum(width for width, _ in steps[:place])), value) for place, (_, value) in enumerate(steps)]
    low, middle, high = sorted([curve[-1][0] * where, curve[-1][0] * then, curve[-1][0]])
    whole, first, second = (mean_over_samples(curve, *ends) for ends in ((low, high), (low, middle), (middle, high)))
    if whole is None:
        assert low == high
        return
    assert min(value for _, value in curve) - 1e-9 <= whole <= max(value for _, value in curve) + 1e-9
    parts = (first or 0) * (middle - low) + (second or 0) * (high - middle)
    assert whole * (high - low) == pytest.approx(parts, abs=1e-6)


def test_the_difference_is_of_pairs_of_equal_seed(tmp_path: Path) -> None:
    a = [make_run(tmp_path, "a", seed, {0: 0.0, 2: value}) for seed, value in ((1, 0.9), (2, 0.5), (3, 0.6))]
    b = [make_run(tmp_path, "b", seed, {0: 0.0, 2: value}) for seed, value in ((4, 0.1), (3, 0.56), (2, 0.4))]
    difference = compared(*a, *b)["difference"]
    assert (difference["groups"], difference["seeds"]) == (["a", "b"], [2, 3])
    after = difference["points"]["accuracy after"]
    assert after["by_seed"] == {2: pytest.approx(10), 3: pytest.approx(4)}
    assert after["mean"] == pytest.approx(7)
    assert after["error"] == pytest.approx(statistics.stdev([10, 4]) / math.sqrt(2)) == pytest.approx(3)
    assert (after["first_higher"], after["second_higher"]) == (2, 0)
    assert difference["points"]["area"]["mean"] == pytest.approx(3.5)
    text, _ = write_comparison([run.root for run in (*a, *b)])
    assert "a less b, in pairs of equal seed (2, 3):" in text
    assert "accuracy after: +7.0 ± 3.0 points; a is higher with 2 of 2 seeds, b with 0. " in text
    assert "better" not in text


def test_groups_without_a_common_seed_are_not_paired(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, seed, {0: 0.0, 2: 0.5}) for name, seed in (("a", 1), ("b", 2))]
    text, _ = write_comparison([run.root for run in runs])
    assert "a and b have no seed in common" in text


@pytest.mark.parametrize(
    ("mean", "error", "seeds", "told"),
    [
        (2.1, 1.0, 5, "It exceeds two standard errors (2.0): a is better here."),
        (-2.1, 1.0, 3, "It exceeds two standard errors (2.0): b is better here."),
        (2.0, 1.0, 5, "The difference lies within the noise of 5 seeds (two standard errors: 2.0)."),
        (-1.0, 1.0, 4, "The difference lies within the noise of 4 seeds (two standard errors: 2.0)."),
        (0.0, 0.0, 3, "The difference lies within the noise of 3 seeds (two standard errors: 0.0)."),
        (9.0, 1.0, 2, "It exceeds two standard errors (2.0), which 2 seeds do not tell reliably."),
        (9.0, None, 1, "One pair says nothing about the noise."),
    ],
)
def test_a_group_is_better_only_beyond_two_standard_errors(
    mean: float, error: float | None, seeds: int, told: str
) -> None:
    assert verdict({"mean": mean, "error": error, "runs": seeds}, "a", "b") == told


def test_runs_are_grouped_by_the_name_that_they_were_given(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "math-8b_v2.1", seed, {0: 0.0, 1: 0.5}).root for seed in (1, 2)]
    assert runs[1].name.endswith("-2"), "made within a second of each other"
    assert {group_of(run) for run in runs} == {"math-8b_v2.1"}
    assert group_of(Path("renamed")) == "renamed"
    assert group_of(Path("a-20260101-3")) == "a-20260101-3"


def test_a_run_given_by_two_names_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 1, {0: 0.0, 1: 0.5})
    assert len(read_runs([tmp_path / "latest", run.root])[0]) == 1


def test_runs_of_a_group_that_differ_in_more_than_seed_and_paths_are_named(tmp_path: Path) -> None:
    same = {"actor__eps_clip": 0.2, "logger__wandb__run_name": "one", "actor__model_name_or_path": "/here/model"}
    other = {**same, "logger__wandb__run_name": "two", "actor__model_name_or_path": "/there/model"}
    one, two = (make_run(tmp_path, "a", seed, {0: 0.0, 1: 0.5}, **at) for seed, at in ((1, same), (2, other)))
    assert compared(one, two)["notes"] == []
    third = make_run(tmp_path, "a", 3, {0: 0.0, 1: 0.5}, **(same | {"actor__eps_clip": 0.3}))
    text, _ = write_comparison([one.root, third.root])
    assert "the runs of a differ in more than the seed: actor.eps_clip: 0.2 (seed 1), 0.3 (seed 3)" in text


def test_a_default_that_is_written_out_is_no_difference(tmp_path: Path) -> None:
    default = Config("", {})["actor.eps_clip"]
    one = make_run(tmp_path, "a", 1, {0: 0.0, 1: 0.5})
    two = make_run(tmp_path, "a", 2, {0: 0.0, 1: 0.5}, actor__eps_clip=default)
    assert differing([read_run(one.root), read_run(two.root)]) == {}


def test_accuracies_that_were_not_measured_alike_are_told(tmp_path: Path) -> None:
    one = make_run(tmp_path, "a", 1, {0: 0.0, 1: 0.5}, actor__eps_clip=0.1)
    two = make_run(tmp_path, "b", 1, {0: 0.0, 1: 0.5}, sha256="f" * 64, eval__temperature=0.5)
    (note,) = compared(one, two)["notes"]
    assert note.startswith("accuracies were not measured alike")
    assert note.endswith("the runs differ in eval.temperature, eval.dataset (contents)")


def draw(call: int, number: int, count: int, accepted: bool = True) -> dict[str, Any]:
    return {"kind": "draw", "call": call, "draw": number, "count": count, "accepted": accepted}


def record_draws(run: RunFolder) -> None:
    """Two steps; the second was done again by a resumed attempt, and one call came to no batch."""
    run.groups.mkdir()
    first = [{"kind": "settings", "call": 0}, draw(0, 0, 40), draw(0, 1, 60, False), draw(0, 2, 60), draw(1, 3, 999)]
    again = [
        {"kind": "settings", "call": 1},
        draw(1, 3, 70),
        draw(1, 4, 10, False),
        draw(1, 5, 30),
        draw(2, 6, 5, False),
    ]
    run.draws.write_text(lines(first) + '{"kind": "draw", "ca\n' + lines(again))
    steps = [{"step": 1, "groups": [{"draw": 0}, {"draw": 2}]}, {"step": 2, "groups": [{"draw": 3}, {"draw": 5}]}]
    run.updates.write_text(lines(steps))


def test_samples_of_filtered_prompts_are_counted_and_superseded_draws_are_not(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 1, {0: 0.0, 1: 0.2, 2: 0.5}, algo__dynamic_filtering_enable=True)
    record_draws(run)
    assert generated_by_step(run.draws, run.updates) == {1: 160, 2: 160 + 110 + 5}
    summary = compared(run)
    assert summary["samples_are"] == "generated"
    (one,) = summary["runs"]
    assert one["curve"] == [[0, 0, 0.0], [1, 160, 0.2], [2, 275, 0.5]]
    assert (one["samples_learnt"], one["samples_generated"]) == (200, 275)


def test_draws_that_do_not_account_for_a_step_tell_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 1, {0: 0.0, 2: 0.5})
    record_draws(run)
    run.draws.write_text(lines([{"kind": "settings", "call": 0}, draw(0, 0, 40)]))
    assert generated_by_step(run.draws, run.updates) is None
    assert generated_by_step(run.root / "none", run.updates) is None


def test_one_axis_never_mixes_generated_samples_with_those_learnt_from(tmp_path: Path) -> None:
    known = make_run(tmp_path, "a", 1, {0: 0.0, 2: 0.5}, algo__dynamic_filtering_enable=True)
    record_draws(known)
    unfiltered = make_run(tmp_path, "b", 1, {0: 0.0, 2: 0.5})
    assert compared(known, unfiltered)["samples_are"] == "generated"
    unknown = make_run(tmp_path, "c", 1, {0: 0.0, 2: 0.5}, algo__dynamic_filtering_enable=True)
    summary = compared(known, unknown)
    assert summary["samples_are"] == "learnt"
    assert [one["samples"] for one in summary["runs"]] == [200, 200]
    assert any(f"is not known of {unknown.root}" in note for note in summary["notes"])


def test_runs_of_different_budgets_are_also_compared_at_equal_samples(tmp_path: Path) -> None:
    short = make_run(tmp_path, "a", 1, {0: 0.0, 2: 0.4})
    long = make_run(tmp_path, "b", 1, {0: 0.0, 1: 0.3, 4: 0.6})
    text, _ = write_comparison([short.root, long.root])
    assert "the last accuracies belong to 200 to 400 samples" in text
    assert "| 200 | 40.0 % | 40.0 % |" in text  # b: on the line from 0.3 after 100 to 0.6 after 400
    assert "on the line between its evaluations" in text
    assert "- accuracy after: -20.0 points" in text
    assert "- accuracy at the most samples that all runs have: +0.0 points" in text
    assert "mean accuracy from 0 to 200 samples" in text


def test_counts_are_of_the_run_that_was_evaluated_least_and_not_too_many() -> None:
    often = [(float(x), 0.5) for x in range(101)]
    assert common_counts([often, [(0.0, 0.1), (60.0, 0.2), (200.0, 0.3)]], 0, 100) == [0, 60, 100]
    assert common_counts([often], 0, 100) == [0, 14, 29, 43, 57, 71, 86, 100]
    assert common_counts([often], 100, 100) == []


def test_a_run_that_was_evaluated_once_has_no_gain_and_hides_no_other(tmp_path: Path) -> None:
    whole = make_run(tmp_path, "a", 1, {0: 0.1, 2: 0.5})
    once = make_run(tmp_path, "a", 2, {2: 0.6})
    summary = compared(whole, once)
    (group,) = summary["groups"].values()
    assert [group[name]["runs"] for name in ("after", "before", "gain_points", "area")] == [2, 1, 1, 1]
    assert [value["runs"] for value in group["at"]] == [1, 2]
    assert any(note.startswith("evaluated once only") and str(once.root) in note for note in summary["notes"])
    assert "10.0 % (1 of 2)" in write_comparison([whole.root, once.root])[0]


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


SPOILT: dict[str, Callable[[RunFolder], Any]] = {
    "is not a run folder: it has no config.yaml": lambda run: run.config.unlink(),
    "did not finish: its last attempt is failed": lambda run: run.attempts[-1].note(outcome="failed"),
    "did not finish: its last attempt is not ended": lambda run: rewrite(
        run.attempts[-1].folder / "attempt.json", "outcome", "other"
    ),
    "was not started": lambda run: shutil.rmtree(run.root / "attempts"),
    "was not evaluated": lambda run: rewrite(run.metrics, "eval_a_pass1", "other"),
    "has steps without rollout/num_samples": lambda run: rewrite(run.metrics, "rollout/num_samples", "other"),
    "cannot be read: JSONDecodeError": lambda run: run.provenance.write_text("{"),
    "train.sed: no such flag": lambda run: run.config.write_text("train.sed: 1"),
}
"""What is said of a run, and what makes it such."""


@pytest.mark.parametrize("told", SPOILT)
def test_a_run_that_cannot_be_compared_is_named_and_hides_no_other(tmp_path: Path, told: str) -> None:
    good = make_run(tmp_path, "a", 1, {0: 0.1, 2: 0.5})
    alone = compared(good)
    bad = make_run(tmp_path, "a", 2, {0: 0.1, 2: 0.9})
    SPOILT[told](bad)
    runs, left_out = read_runs([bad.root, good.root])
    assert compare(runs) == alone
    assert list(left_out) == [str(bad.root)]
    assert told in left_out[str(bad.root)]


def test_runs_that_were_left_out_are_told_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (make_run(tmp_path, "a", seed, {0: 0.1, 2: 0.5}) for seed in (1, 2))
    bad.attempts[-1].note(outcome="stopped")
    reason = "did not finish: its last attempt is stopped"
    assert main(["report", str(bad.root), str(good.root), "--output", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert err == f"warning: {bad.root} is left out: {reason}\n"
    assert f"- {bad.root}: {reason}" in out
    assert "| a | 1 | 200 | 10.0 % | 50.0 % | +40.0 | 30.0 % |" in out
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["left_out"] == {str(bad.root): reason}
    assert main(["report", str(bad.root), str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("none of these runs can be compared:\n")
    assert f"{bad.root}: {reason}" in err and f"{tmp_path / 'nothing'}: is not a run folder" in err


def test_of_equal_seeds_the_run_that_was_started_last_counts(tmp_path: Path) -> None:
    late = make_run(tmp_path, "a", 1, {0: 0.0, 1: 0.7}, started=2000.0)
    early = make_run(tmp_path, "a", 1, {0: 0.0, 1: 0.5}, started=1000.0)
    runs, left_out = read_runs([late.root, early.root])
    assert [run.folder for run in runs] == [late.root]
    assert left_out == {str(early.root): f"has the seed 1 of {late.root}, which was started later"}


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "runs", name, 1, {0: 0.1, 2: 0.5}) for name in "ab"]
    words = [str(run.root) for run in runs]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        write_comparison([run.root for run in runs])
    folders = sorted((tmp_path / "runs").glob("comparison-*"))
    assert len(folders) == 2
    for folder in folders:
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["comparison.json", "comparison.md", "comparison.png"]
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}.items()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "comparison.md").write_text("mine")
    assert main(["report", words[0], "--output", str(tmp_path / "taken"), words[1]]) == 2
    assert "is there already, and nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "taken" / "comparison.md").read_text() == "mine"


def test_what_is_printed_is_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path, name, 1, {0: 0.1, 2: 0.5}) for name in "ab"]
    assert main(["report", "--output", str(tmp_path / "new" / "out"), *(str(run.root) for run in runs)]) == 0
    assert capsys.readouterr().out.strip() == (tmp_path / "new" / "out" / "comparison.md").read_text().strip()


def test_one_run_is_reported_as_before_and_takes_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "a", 1, {0: 0.1, 2: 0.5})
    assert main(["report", str(run.root)]) == 0
    assert "# Finished after 2 steps" in capsys.readouterr().out
    assert not list(tmp_path.glob("comparison-*"))
    assert main(["report", str(run.root), "--output", str(tmp_path / "out")]) == 2
    assert "--output is for a comparison" in capsys.readouterr().err


@pytest.mark.parametrize(("seeds", "band"), [(1, None), (2, "range"), (3, "standard error")])
def test_the_band_is_the_standard_error_only_of_enough_seeds(tmp_path: Path, seeds: int, band: str | None) -> None:
    runs = [make_run(tmp_path, "a", seed, {0: 0.0, 2: 0.2 + seed / 10}) for seed in range(1, seeds + 1)]
    (group,) = compared(*runs)["groups"].values()
    assert group["band"] == band
    last, mean = group["curve"][-1], 0.2 + (seeds + 1) / 20
    width = 0.1 / math.sqrt(3) if seeds == 3 else 0.05 * (seeds - 1)
    assert (last["samples"], last["mean"]) == (200, pytest.approx(mean))
    assert (last["low"], last["high"]) == (pytest.approx(mean - width), pytest.approx(mean + width))


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_the_plot_has_its_panels_and_no_legend_covers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **named: (figures.append(self), save(self, *given)))
    names = [f"a name of many letters {number}" for number in range(groups)]
    runs = [make_run(tmp_path, name, seed, {0: 0.1, 1: 0.3, 2: 0.5}) for name in names for seed in (1, 2)]
    write_comparison([run.root for run in runs])
    drawn = {axes.get_title(): axes for axes in figures[-1].axes}
    titles = {"Validation accuracy", "Accuracy at the last evaluation", "Samples that taught something"}
    assert set(drawn) == titles | ({"Pairs of equal seed"} if groups == 2 else set())
    assert drawn["Validation accuracy"].get_xlabel() == "training samples generated"
    labels = drawn["Validation accuracy"].get_legend_handles_labels()[1]
    assert labels == [f"{name}: mean of 2 seeds, band: range" for name in names]
    boxes = [axes.get_window_extent() for axes in drawn.values()]
    legends = [axes.get_legend().get_window_extent() for axes in drawn.values() if axes.get_legend()]
    assert len(legends) == 2 + (groups == 2)
    assert not [box for legend in legends for box in boxes if legend.overlaps(box)]
