"""The report: what is read of a run, how its time is divided, and that a plot is drawn of whatever there is."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from slurm import ROOT
from slurm.config import Config, Setting
from slurm.metrics import Record, accuracy, follow, last_of_each_step, parse_record, read_records
from slurm.plot import smoothed
from slurm.report import as_markdown, summarize, time_by_phase, write_report
from slurm.run_folder import RunFolder, create_run

STEP = {
    "reward": 0.5,
    "accuracy": 0.5,
    "actor_grad_norm": 1.0,
    "rollout/response_length_mean": 10.0,
    "rollout/num_samples": 64.0,
    "timing/generation": 1.0,
    "timing/make_experience": 0.5,
    "timing/ppo_train": 2.0,
    "timing/broadcast": 0.5,
    "timing/step_total": 4.0,
}


def train(step: int, time: float, **metrics: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "time": time, "metrics": STEP | metrics}


def evaluation(step: int, time: float, **metrics: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "time": time, "metrics": metrics}


ROWS = [
    evaluation(0, 1030, eval_easy_pass1=0.4, eval_hard_pass1=0.1, eval_num_samples=40),
    train(1, 1035),
    train(2, 1040),
    evaluation(2, 1043, eval_easy_pass1=0.8, eval_hard_pass1=0.3, eval_num_samples=40),
]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    data = {"eval.dataset": [{"by_source": {"easy": 10, "hard": 30}}]}
    folder = create_run(tmp_path, "toy", Config("toy", {"train.seed": Setting(1, "here")}), ["typed"], {"data": data})
    folder.new_attempt().note(started=1000.0, ended=1045.0, outcome="finished", exit_code=0)
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_accuracy_is_weighted_by_the_prompts_of_each_source(run: RunFolder) -> None:
    summary = summarize(run, read_records(run.metrics), {})
    accuracies = summary["accuracy"]
    assert accuracies["before"] == pytest.approx((0.4 * 10 + 0.1 * 30) / 40)
    assert accuracies["after"] == pytest.approx((0.8 * 10 + 0.3 * 30) / 40)
    assert accuracies["gain_points"] == pytest.approx(25)
    assert accuracies["by_source"]["hard"] == {"before": 0.1, "after": 0.3, "prompts": 30}
    assert accuracy({"eval_easy_pass1": 0.4, "eval_hard_pass1": 0.2}, {"easy": 5}) == pytest.approx(0.3)
    assert accuracy({"reward": 1.0}, {}) is None


def test_time_is_divided_without_remainder(run: RunFolder) -> None:
    summary = summarize(run, read_records(run.metrics), {})
    assert summary["seconds"] == 45
    assert summary["seconds_by_phase"] == {
        "start-up": 30,
        "generation": 2,
        "experience": 1,
        "training": 4,
        "weight sync": 1,
        "evaluation": 3,
        "other": 4,
    }
    assert summary["median_step_seconds"] == 4
    assert summary["median_tokens_per_second"] == 160


def test_a_timed_first_evaluation_is_no_part_of_the_start() -> None:
    records = [Record("eval", 0, 1030.0, {"timing/evaluation": 10.0}), Record("train", 1, 1034.0, STEP)]
    phases = time_by_phase([{"started": 1000.0, "ended": 1034.0}], records)
    assert (phases["start-up"], phases["evaluation"]) == (20, 10)


def test_each_attempt_has_its_own_start_and_a_killed_one_ends_with_its_last_record() -> None:
    records = [Record("train", 1, 1010.0, STEP), Record("train", 1, 2020.0, STEP)]
    phases = time_by_phase([{"started": 1000.0}, {"started": 2000.0, "ended": 2021.0}], records)
    assert phases["start-up"] == 6 + 16
    assert phases["training"] == 4
    assert phases["other"] == 1


def test_of_a_repeated_step_the_last_counts() -> None:
    rows = [Record("train", 1, 1, {"a": 1}), Record("train", 2, 2, {"a": 2}), Record("train", 2, 3, {"a": 3})]
    rows += [Record("eval", 2, 4, {"a": 4})]
    kept = last_of_each_step(rows)
    assert [(record.kind, record.step, record.metrics["a"]) for record in kept] == [
        ("train", 1, 1),
        ("train", 2, 3),
        ("eval", 2, 4),
    ]


def test_a_half_written_last_line_is_left_out(run: RunFolder) -> None:
    whole = run.metrics.read_text()
    for end in range(len(whole) - 60, len(whole) - 1, 7):
        run.metrics.write_text(whole[:end])
        assert len(read_records(run.metrics)) == len(ROWS) - 1
    for broken in ("", "null", "[]", "3", '{"kind": "train"}', '{"metrics": null}', "\0\0\0"):
        assert parse_record(broken) is None


def test_following_a_file_gives_each_line_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = follow(path)
    assert next(lines) == []
    path.write_text("one\ntw")
    assert next(lines) == ["one"]
    assert next(lines) == []
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert next(lines) == ["two", "three"]
    assert next(follow(path, 4)) == ["two", "three"]


def test_the_report_is_written_for_a_whole_run_and_for_one_that_recorded_nothing(run: RunFolder) -> None:
    for text in (run.metrics.read_text(), ""):
        run.metrics.write_text(text)
        summary = write_report(run)
        assert json.loads(run.summary_json.read_text()) == summary
        assert run.summary_text.read_text() == as_markdown(summary)
        image = imread(run.curves)
        assert image.shape[0] > 400
        assert image.std() > 0.01


def test_the_summary_says_before_after_and_gain(run: RunFolder) -> None:
    text = as_markdown(summarize(run, read_records(run.metrics), {}))
    assert "# Finished after 2 steps" in text
    assert "| easy | 10 | 40.0 % | 80.0 % | +40.0 |" in text
    assert "| **all** | 40 | 17.5 % | 42.5 % | +25.0 |" in text
    assert "| start-up | 30.0 s | 67 % |" in text
    assert str(run.curves) in text


def test_one_evaluation_is_no_gain(run: RunFolder) -> None:
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    summary = write_report(run)
    assert (summary["accuracy"]["before"], summary["accuracy"]["gain_points"]) == (None, None)
    assert "| validation accuracy | prompts | after step 2 |" in as_markdown(summary)
    assert "| **all** | 40 | 42.5 % |" in as_markdown(summary)


def test_smoothing_keeps_a_constant_and_starts_at_the_first_value() -> None:
    assert smoothed([2.0] * 5, 3) == pytest.approx([2.0] * 5)
    assert smoothed([1.0, 0.0, 0.0, 0.0], 3)[0] == 1.0
    assert smoothed([1.0, 0.0, 0.0, 0.0], 3)[-1] < 0.1


def written(run: RunFolder, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(run, read_records(run.metrics), {})
    return summary, as_markdown(summary)


def test_the_convergence_step_is_told_of_enough_evaluations(run: RunFolder) -> None:
    def rise(step: int) -> float:
        return 0.2 + 0.4 * (1 - math.exp(-step / 50))

    def rows(values: Mapping[int, float]) -> list[dict[str, Any]]:
        return [evaluation(step, 1000.0 + step, eval_easy_pass1=value) for step, value in values.items()]

    summary, text = written(run, rows({step: rise(step) for step in range(0, 501, 5)}))
    assert summary["convergence"]["step"] == pytest.approx(152.88, abs=0.01)
    assert "Accuracy converged at step 153." in text
    summary, text = written(run, rows({step: 0.2 + 0.001 * step for step in range(0, 501, 5)}))
    assert summary["convergence"] == {"step": None}
    assert "Accuracy had not converged." in text
    summary, text = written(run, rows(dict.fromkeys(range(11), 0.5)))
    assert summary["convergence"] is None
    assert "converged" not in text


def test_sharpness_and_policy_are_told_where_steps_have_them(run: RunFolder) -> None:
    names = {"policy/entropy": 1.0, "policy/aligned": 0.5, "policy/uncertainty": 0.25}
    rows = [
        train(1, 1010, **{"groups/sharpness": 10.0}, **names),
        train(2, 1020, **{"groups/sharpness": 20.0, "policy/effective_sharpness": 0.5}),
        train(3, 1030, **{name: value / 2 for name, value in names.items()}),
    ]
    summary, text = written(run, rows)
    assert summary["sharpness"] == {"groups/sharpness": 15, "policy/effective_sharpness": 0.5}
    assert summary["policy"]["policy/entropy"] == [1.0, 0.5]
    assert "(A⁺ − A⁻)/β of a group: 15 (mean over steps)" in text and ": 0.5 (mean" in text
    assert "| tokens that are the mode | 0.5000 | 0.2500 |" in text
    summary, text = written(run, ROWS)
    assert (summary["sharpness"], summary["policy"]) == ({}, {})
    assert "κ" not in text and "| policy" not in text


def test_reports_need_no_torch() -> None:
    check = "import slurm.report, slurm.comparison_numbers, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)
