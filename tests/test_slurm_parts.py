"""Parts of a run, each by itself: its environment, its folder, what made it, what is shown of it, why it failed."""

import json
import subprocess
import sys
from importlib import metadata
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slurm import ROOT
from slurm.config import Config
from slurm.environment import trainer_environment
from slurm.inputs import Inputs
from slurm.local import failure, trainer_command
from slurm.metrics import Record
from slurm.progress import EXPENDABLE, Status, Watch, clock
from slurm.provenance import gather
from slurm.run_folder import create_run, open_run


def test_a_cuda_run_keeps_the_users_choice_of_devices() -> None:
    launch = Config("any", {}).launch
    made = trainer_environment(launch, Path("/run"), {"CUDA_VISIBLE_DEVICES": "2,3", "PYTHONPATH": "/elsewhere"})
    assert made["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not {"PYTHONPATH", "DS_ACCELERATOR"} & made.keys()


def test_run_folders_of_one_second_do_not_meet(tmp_path: Path) -> None:
    made = [create_run(tmp_path, "same", Config("same", {}), [], {}) for _ in range(3)]
    assert len({run.root for run in made}) == 3
    assert (tmp_path / "latest").resolve() == made[-1].root


def test_a_run_made_through_a_link_is_found_by_the_path_that_its_processes_bear(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    run = create_run(tmp_path / "runs", "linked", Config("linked", {}), [], {})
    assert run.root.parent == tmp_path / "disk"
    assert open_run(tmp_path / "runs" / "latest").root == run.root


def test_the_fork_of_a_run_is_the_one_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "openrlhf-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: openrlhf\nVersion: 9.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert (gather(Inputs())["packages"]["openrlhf"], gather(Inputs())["fork"]) == ("9.9", None)
    (info / "fork.json").write_text(json.dumps({"version": "9.9", "upstream": "9", "queue_hash": "c0", "key": "1"}))
    assert gather(Inputs())["fork"] == {"version": "9.9", "upstream": "9", "queue_hash": "c0"}


def test_without_the_fork_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert gather(Inputs())["fork"] is None


def test_the_start_is_told_in_stages_and_a_terminal_gets_a_live_line(tmp_path: Path) -> None:
    for terminal in (False, True):
        run = create_run(tmp_path, "shown", Config("shown", {}), [], {})
        attempt = run.new_attempt()
        screen = StringIO()
        console = Console(file=screen, force_terminal=terminal, width=120)
        watch = Watch(run, attempt, Status(40, {}), console)
        attempt.log.write_text("INFO Started a local Ray instance.\n")
        watch.tick()
        row = {"kind": "train", "step": 2, "time": 1.0, "metrics": {"reward": 0.25, "accuracy": 0.5}}
        run.metrics.write_text(json.dumps(row) + "\n")
        watch.close()
        assert "loading the engines" in screen.getvalue()
        assert "step 2/40" in screen.getvalue()
        assert "reward 0.25  accuracy 0.50" in screen.getvalue()
        assert ("\x1b[" in screen.getvalue()) == terminal


def test_time_left_follows_the_pace_of_the_last_steps() -> None:
    status = Status(total=20, rows={})
    assert status.seconds_left is None
    for step in range(1, 12):
        status.see(Record("train", step, 100.0 + 2 * step, {}))
    assert status.seconds_left == 18
    assert status.step() == "left 0:18"
    assert (clock(5), clock(65), clock(3725)) == ("0:05", "1:05", "1:02:05")


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({}, ""),
        ({"groups/count_min": 4, "groups/count_max": 12}, "samples 4-12"),
        ({"groups/count_min": 8, "groups/count_max": 8}, "samples 8"),
        ({"groups/effective_samples": 78, "rollout/num_samples": 128}, "learning from 61 %"),
        ({"groups/effective_samples": 0, "rollout/num_samples": 0}, ""),
        (
            {
                "accuracy": 0.5,
                "groups/count_min": 1,
                "groups/count_max": 9,
                "groups/effective_samples": 0,
                "rollout/num_samples": 9,
            },
            "accuracy 0.50  samples 1-9  learning from 0 %",
        ),
    ],
)
def test_a_steps_line_tells_where_its_budget_went(metrics: dict[str, float], told: str) -> None:
    status = Status(None, {})
    status.see(Record("train", 1, 0.0, metrics))
    assert status.step() == told


@given(st.integers(0, 120))
def test_a_narrow_terminal_loses_what_matters_least_and_keeps_accuracy_and_time_left(width: int) -> None:
    metrics = {"reward": 0.5, "accuracy": 0.5, "actor_grad_norm": 1.0, "rollout/num_samples": 64.0}
    metrics |= {"rollout/response_length_mean": 10.0, "timing/step_total": 4.0}
    metrics |= {"groups/count_min": 4.0, "groups/count_max": 12.0, "groups/effective_samples": 32.0}
    status = Status(20, {})
    for step in (1, 2):
        status.see(Record("train", step, float(step), metrics))
    whole, fitted = status.step(), status.step(width)
    assert "accuracy 0.50" in fitted and fitted.endswith("left 0:18")
    kept = fitted.split("  ")
    assert kept == [words for words in whole.split("  ") if words in kept]
    left_out = [name for name in EXPENDABLE if name not in fitted]
    assert left_out == list(EXPENDABLE[: len(left_out)])
    assert len(fitted) <= width or len(left_out) == len(EXPENDABLE)
    assert not left_out or len(whole) > width


def test_the_launcher_gives_the_trainer_its_files_in_the_run_folder(tmp_path: Path) -> None:
    run = create_run(tmp_path, "owned", Config("owned", {}), [], {})
    command = trainer_command(run, Config("owned", {}))
    assert f"--logger.groups_path={run.root}/groups" in command
    assert f"--logger.metrics_path={run.root}/metrics.jsonl" in command
    assert {run.draws.parent, run.updates.parent} == {run.root / "groups"}


@pytest.mark.parametrize(
    ("log", "reason"),
    {
        "loading\n\x1b[36m(Actor pid=7)\x1b[0m Traceback (most recent call last):\n"
        "\x1b[36m(Actor pid=7)\x1b[0m torch.OutOfMemoryError: tried to allocate\n(raylet) done\n": [
            "torch.OutOfMemoryError: tried to allocate"
        ],
        "(Engine pid=1) (Core pid=2) ERROR 11-29 23:03:01 [core.py:1376] RuntimeError: no offset\n"
        "EngineDeadError: see above\nrun failed: engine 0 has died\n": [
            "run failed: engine 0 has died",
            "RuntimeError: no offset",
        ],
        "ValueError: empty\nrun failed: ValueError: empty\n": ["run failed: ValueError: empty"],
        "usage: trainer\ntrainer: error: unrecognized arguments: --x\n": [
            "trainer: error: unrecognized arguments: --x"
        ],
        "one\ntwo\nthree\nfour\n\n": ["two", "three", "four"],
    }.items(),
)
def test_the_reason_of_a_failure_is_found_under_what_ray_and_vllm_write_around_it(
    tmp_path: Path, log: str, reason: list[str]
) -> None:
    path = tmp_path / "driver.log"
    assert failure(path) == []
    path.write_text(log)
    assert failure(path) == reason


def test_a_log_in_node_needs_neither_torch_nor_ray_nor_vllm_nor_a_plotting_library() -> None:
    heavy = {"torch", "ray", "vllm", "deepspeed", "transformers", "openrlhf", "matplotlib"}
    code = f"import sys, slurm.__main__; print(*sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
