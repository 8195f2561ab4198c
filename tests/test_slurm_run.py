"""Runs: the folder they leave, how they are ended, and what the user is told. A script stands in for the trainer."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slurm import ROOT
from slurm.__main__ import main
from slurm.config import read_config
from slurm.environment import RUN_MARK
from slurm.inputs import absolute
from slurm.processes import GRACE
from slurm.run_folder import RunFolder, create_run, open_run, read_json, write_json

# Started as the trainer would be. `behaviour` is filled in by each test and runs with these names at hand.
TRAINER = """
import json, os, pathlib, signal, subprocess, sys, time
out = pathlib.Path(next(word for word in sys.argv if word.startswith("--logger.metrics_path=")).partition("=")[2])
sleep = "import time; time.sleep(600)"

def record(kind, step, **metrics):
    with out.open("a") as file:
        row = {"kind": kind, "step": step, "time": time.time(), "metrics": metrics}
        file.write(json.dumps(row) + "\\n")

def leave_behind(**how):
    # As Ray does it: in a session of its own, and with nothing of the run in its environment.
    child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True, **how)
    with out.with_name("pids").open("a") as file:
        file.write(f"{child.pid}\\n")

def ready():
    out.with_name("pids").open("a").write(f"{os.getpid()}\\n")
    out.with_name("ready").touch()
"""

RECIPE = """
launch.device: cpu
actor.model_name_or_path: {folder}/model
actor.num_gpus_per_node: 1
data.prompt_dataset: {folder}/train.jsonl
data.label_key: label
eval.dataset: {folder}/validation.jsonl
reward.remote_url: {folder}/reward.py
algo.advantage.estimator: group_norm
algo.kl.init_coef: 0
vllm.num_engines: 1
rollout.batch_size: 2
rollout.n_samples_per_prompt: 4
train.batch_size: 8
"""


@dataclass
class Place:
    """A recipe with its inputs in a folder, and the command line that runs it with a stand-in for the trainer."""

    folder: Path
    grace: float = GRACE

    @property
    def recipe(self) -> Path:
        return self.folder / "toy.yaml"

    @property
    def run(self) -> RunFolder:
        return open_run(self.folder / "runs" / "latest")

    def stand_in(self, behaviour: str) -> None:
        (self.folder / "trainer.py").write_text(TRAINER + behaviour)

    def start(self, *words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        script = self.folder / "command.py"
        script.write_text(
            "import sys\nfrom slurm import __main__, local, processes\nreal = local.trainer_command\n"
            f"processes.GRACE = {self.grace}\n"
            f"fake = [sys.executable, {str(self.folder / 'trainer.py')!r}]\n"
            "local.trainer_command = lambda *given, **named: [*fake, *real(*given, **named)[3:]]\n"
            "sys.exit(__main__.main())\n"
        )
        return subprocess.Popen(
            [sys.executable, str(script), *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def submit(self, *words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        runs = str(self.folder / "runs")
        return self.start("submit", str(self.recipe), "--runs", runs, *words, environment=environment)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 90
        while not (self.folder / "runs" / "latest" / "ready").exists():
            assert time.monotonic() < deadline, "the stand-in did not start"
            time.sleep(0.05)

    def living(self) -> list[int]:
        pids = map(int, (self.run.root / "pids").read_text().split())
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name, rows in (("train", 6), ("validation", 4)):
        lines = (json.dumps({"input": f"{name} {row}", "label": "1", "datasource": "sums"}) for row in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels, **kwargs): ...\n")
    (tmp_path / "toy.yaml").write_text(RECIPE.format(folder=tmp_path))
    yield Place(tmp_path)
    pids = tmp_path / "runs" / "latest" / "pids"
    for pid in map(int, pids.read_text().split() if pids.exists() else []):
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def finish(process: subprocess.Popen[str], within: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


LEARNS = """
print("Started a local Ray instance.", flush=True)
record("eval", 0, eval_sums_pass1=0.25)
for step in 1, 2, 3:
    record("train", step, reward=0.5, accuracy=0.5, **{"timing/step_total": 0.1, "rollout/reward_mean": 0.5})
record("eval", 3, eval_sums_pass1=0.75)
"""


def test_a_run_leaves_a_complete_folder_and_a_report(place: Place) -> None:
    place.stand_in(LEARNS)
    status, out, err = finish(place.submit("train.seed=7", "--name", "first"))
    assert (status, err) == (0, "")
    assert "accuracy 0.25 after step 0" in out
    assert "step 3/3" in out
    assert "| **all** | 4 | 25.0 % | 75.0 % | +50.0 |" in out
    run = place.run
    assert run.root.name.startswith("first-")
    assert str(run.curves) in out
    assert run.curves.stat().st_size > 1000
    assert json.loads(run.command.read_text())["typed"][-3:] == ["train.seed=7", "--name", "first"]
    provenance = json.loads(run.provenance.read_text())
    assert provenance["packages"]["ray"]
    assert provenance["data"]["data.prompt_dataset"][0]["rows"] == 6
    (attempt,) = run.attempts
    record = attempt.record
    assert (record["outcome"], record["exit_code"], record["not_ended"]) == ("finished", 0, [])
    assert record["started"] < record["ended"]
    assert "--train.seed=7" in record["command"]
    assert f"--ckpt.path={run.root}/checkpoints" in record["command"]


def test_the_configuration_of_a_run_is_a_recipe_that_repeats_it(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []
    settings = ["train.seed=7", "actor.adam.lr=5e-7", "actor.adam.betas=[0.9, 1]"]
    config = absolute(read_config(place.recipe, settings))
    run = create_run(place.folder / "runs", "first", config, [], {})
    for words in [str(place.recipe), *settings], [str(run.config)]:
        assert main(["submit", "--dry-run", *words]) == 0
        shown = capsys.readouterr().out.partition("# cpu")[2].splitlines()
        commands.append([word for word in shown if "/runs/" not in word and "run_name" not in word])
    assert commands[0] == commands[1]
    assert "--actor.adam.lr=5e-07 \\" in " ".join(commands[0])


@pytest.mark.parametrize(
    ("behaviour", "status", "told"),
    [
        (
            "print('ValueError: a guess'); print('run failed: engine 0: out of memory'); sys.exit(3)",
            3,
            "run failed: eng",
        ),
        ("raise ValueError('the loader is empty')", 1, "ValueError: the loader is empty"),
        ("print('giving up'); sys.exit(4)", 4, "giving up"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "the trainer failed"),
    ],
)
def test_a_failure_has_the_trainers_status_its_reason_and_its_log_and_no_traceback(
    place: Place, behaviour: str, status: int, told: str
) -> None:
    place.stand_in(behaviour)
    code, out, err = finish(place.submit())
    assert code == status
    assert told in err
    assert str(place.run.attempts[0].log) in err
    assert "Traceback" not in out + err
    assert place.run.attempts[0].record["outcome"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_every_process_of_a_run(place: Place, number: signal.Signals) -> None:
    place.stand_in(
        "leave_behind(); leave_behind(env={})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (out.with_name('asked').touch(), sys.exit(0)))\n"
        "ready(); time.sleep(600)\n"
    )
    process = place.submit()
    place.wait_until_ready()
    assert len(place.living()) == 3
    process.send_signal(number)
    status, _, err = finish(process)
    assert status == 128 + number
    assert place.living() == []
    assert (place.run.root / "asked").exists()
    assert place.run.attempts[0].record["outcome"] == "stopped"
    assert "stopped, before the first checkpoint" in err


def test_a_trainer_that_will_not_end_is_killed_by_a_second_signal(place: Place) -> None:
    place.grace = 600
    place.stand_in("signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)")
    process = place.submit()
    place.wait_until_ready()
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert len(place.living()) == 1
    process.send_signal(signal.SIGINT)
    status, _, _ = finish(process, within=60)
    assert status == 130
    assert place.living() == []


def test_what_a_finished_trainer_leaves_behind_is_ended(place: Place) -> None:
    place.stand_in("leave_behind(); leave_behind(env={}); ready()")
    status, _, _ = finish(place.submit())
    assert status == 0
    assert place.living() == []


def test_a_trainer_whose_launcher_is_killed_is_asked_to_end(place: Place) -> None:
    place.stand_in("ready(); time.sleep(600)")
    process = place.submit()
    place.wait_until_ready()
    process.kill()
    finish(process)
    deadline = time.monotonic() + 60
    while place.living() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert place.living() == []


def test_nothing_of_the_users_environment_reaches_the_trainer_but_what_is_allowed(place: Place) -> None:
    place.stand_in("json.dump(dict(os.environ), out.with_name('environment.json').open('w'))")
    secrets = {"WANDB_API_KEY": "wandb-secret-1", "HF_TOKEN": "hub-secret-2"}
    others = {
        "RAY_ADDRESS": "10.0.0.1:6379",
        "CUDA_VISIBLE_DEVICES": "",
        "MY_PASSWORD": "secret-3",
        "OMP_NUM_THREADS": "9",
    }
    assert finish(place.submit("logger.wandb.key=environment", environment=secrets | others))[0] == 0
    path = place.run.root / "environment.json"
    given = json.loads(path.read_text())
    assert {name: given.get(name) for name in secrets} == secrets
    assert not {"RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "MY_PASSWORD", "PYTHONPATH"} & given.keys()
    assert (given["DS_ACCELERATOR"], given["OMP_NUM_THREADS"], given["HF_HUB_OFFLINE"]) == ("cpu", "1", "1")
    assert given[RUN_MARK] == str(place.run.root)
    path.unlink()
    written = [file.read_bytes() for file in place.run.root.rglob("*") if file.is_file()]
    assert not any(b"secret-" in content for content in written)


RESUMES = """
resumed = "--ckpt.load_enable" in sys.argv
record("train", 2 if resumed else 1, reward=0.5)
newest = out.with_name("checkpoints") / "_actor" / "latest"
newest.parent.mkdir(parents=True, exist_ok=True)
newest.write_text("global_step1")
sys.exit(0 if resumed else 5)
"""


def test_a_resume_is_a_new_attempt_in_the_same_folder(place: Place) -> None:
    place.stand_in(RESUMES)
    assert finish(place.submit())[0] == 5
    folder = str(place.folder / "runs" / "latest")
    status, _, err = finish(place.start("resume", folder))
    assert (status, err) == (0, "")
    run = place.run
    assert [(one.number, one.record["outcome"]) for one in run.attempts] == [(1, "failed"), (2, "finished")]
    assert len(run.metrics.read_text().splitlines()) == 2
    status, _, err = finish(place.start("resume", folder))
    assert status == 2
    assert "is finished; there is nothing to resume" in err


def test_t13_a_run_is_not_resumed_across_versions_or_data_unless_told_so(place: Place) -> None:
    place.stand_in(RESUMES)
    finish(place.submit())
    folder = str(place.folder / "runs" / "latest")
    facts = read_json(place.run.provenance)
    facts["packages"]["torch"] = "2.0.0"
    (data,) = facts["data"]["data.prompt_dataset"]
    data["sha256"] = "0" * 64
    write_json(place.run.provenance, facts)
    status, _, err = finish(place.start("resume", folder))
    assert status == 2
    assert "torch 2.0.0 -> 2." in err and f"data.prompt_dataset: {data['path']} has other contents" in err
    assert "restore it, or resume with --allow-changes" in err
    assert finish(place.start("resume", folder, "--allow-changes"))[0] == 0
    assert place.run.attempts[-1].record["changed"][0].startswith("torch 2.0.0 -> ")


def test_a_run_without_a_checkpoint_or_still_running_is_not_resumed(place: Place) -> None:
    place.stand_in("ready(); time.sleep(600)")
    process = place.submit()
    place.wait_until_ready()
    folder = str(place.folder / "runs" / "latest")
    assert "is still running: processes" in finish(place.start("resume", folder))[2]
    process.terminate()
    finish(process)
    assert "holds no checkpoint; `ckpt.save_steps: N` saves one" in finish(place.start("resume", folder))[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["submit", "missing.yaml"], "cannot read missing.yaml: No such file or directory"),
        (["submit", "{recipe}", "--cluster", "h200"], "'h200': this version runs recipes on this machine only"),
        (["submit", "{recipe}", "--name", "../up"], "--name ../up: expected letters"),
        (["submit", "{recipe}", "--quick"], "not understood: --quick"),
        (["submit", "{recipe}", "train.sed=1"], "1 fault, nothing was started:\ncommand line: train.sed: no such flag"),
        (["submit", "{recipe}", "eval.at_start=true", "eval.dataset=null"], "eval.at_start (True): needs eval.dataset"),
        (["submit", "{recipe}", "data.max_samples=5"], "write data.max_samples: 4"),
        (["submit", "{recipe}", "data.label_key=answer"], "line 1: 'answer' (data.label_key) is missing"),
        (
            ["submit", "{recipe}", "launch.device=cuda"],
            "this recipe places 2 GPUs (actor 1, vllm 1), and 0 are visible",
        ),
        (["report", "{folder}"], "is not a run folder: it has no config.yaml"),
        (["resume", "{folder}"], "is not a run folder: it has no config.yaml"),
        (["resume", "{folder}", "more"], "not understood: more"),
        (["report", "{folder}", "more"], "none of these runs can be compared:"),
        (["report", "{folder}", "more", "--fast"], "not understood: --fast"),
    ],
)
def test_a_bad_request_is_told_and_starts_nothing(place: Place, words: list[str], told: str) -> None:
    place.stand_in("ready()")
    filled = [word.format(recipe=place.recipe, folder=place.folder) for word in words]
    status, out, err = finish(place.start(*filled, environment={"CUDA_VISIBLE_DEVICES": ""}))
    assert (status, out) == (2, "")
    assert told in err
    assert "Traceback" not in err
    assert not (place.folder / "runs").exists()


def test_a_dry_run_shows_the_resolved_configuration_and_the_command(place: Place) -> None:
    words = ("train.seed=7", "data.max_samples=5", "rollout.n_samples_per_prompt=8", "data.input_template=Q: {} it's")
    status, out, _ = finish(place.submit("--dry-run", *words))
    assert status == 0
    assert "train.seed: 7" in out
    assert "# command line" in out
    assert "-m \\\n    openrlhf.cli.train_ppo_ray" in out or "trainer.py" in out
    assert "--train.seed=7" in out
    assert "# cpu: actor 1, vllm 1" in out
    assert "# warning: 5 prompts are no multiple of rollout.batch_size 2: an episode's last step has 1" in out
    command = shlex.split(out.rpartition("# warning")[2].partition("\n")[2])
    assert "--data.input_template=Q: {} it's" in command
    assert f"--ckpt.path={place.folder}/runs/toy-TIME/checkpoints" in command
    assert not (place.folder / "runs").exists()
