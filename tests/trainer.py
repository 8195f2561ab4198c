"""Runs the real trainer on CPU in a process of its own, for the tests that state what a run does."""

import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
REWARD = Path(__file__).with_name("reward_digits.py")

# Eight steps of 32 samples; every run differs from this in what it is about.
FLAGS: dict[str, Any] = {
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "critic.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "vllm.enforce_eager": True,
    "reward.remote_url": REWARD,
    "data.input_key": "input",
    "data.label_key": "label",
    "data.apply_chat_template": True,
    "data.max_len": 64,
    "data.max_samples": 64,
    "rollout.max_new_tokens": 8,
    "rollout.n_samples_per_prompt": 4,
    "rollout.batch_size": 8,
    "rollout.micro_batch_size": 8,
    "train.batch_size": 32,
    "train.micro_batch_size": 8,
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0,
    "actor.adam.lr": 1e-3,
    "actor.lr_scheduler": "constant",
}

# Makes the trainer measure, as vllm_kl, how far the engine's log-probabilities are from the actor's.
MEASURE_SYNC = {"algo__advantage__is_correction_level": "token", "algo__advantage__is_correction_mode": "clip"}

TIMINGS = "timing/"


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    folder: Path
    returncode: int

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """All metrics of each step but the times, to the last bit, as every build prints them."""
        found = re.findall(r"Global step (\d+): (\{.*\})", self.log)
        return {int(step): _untimed(ast.literal_eval(metrics)) for step, metrics in found}

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Metrics of each evaluation, from the metrics file."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["metrics"] for line in lines if line["kind"] == "eval"}

    @property
    def weights(self) -> str:
        """Hash of the weights that the run saved at its end."""
        return _hash(self.folder / "model", "*.safetensors")

    def optimizer(self, step: int) -> str:
        """Hash of master weights and moments in the checkpoint of a step."""
        import torch

        digest = hashlib.sha256()
        paths = sorted((self.folder / "checkpoints" / "_actor" / f"global_step{step}").glob("*optim_states.pt"))
        assert paths, f"no checkpoint of step {step} in {self.folder}"
        for path in paths:
            for tensor in _tensors(torch.load(path, map_location="cpu", weights_only=False)["optimizer_state_dict"]):
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def start(folder: Path, task: Path, *, package: Path | None = None, **flags: Any) -> subprocess.Popen:
    """Start a run in ``folder``; flags with dots replaced by two underscores come on top of FLAGS.

    Args:
        task: folder of the tiny task: ``model`` and ``train.jsonl``.
        package: a development tree to run instead of the installed fork.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = {name.replace("__", "."): value for name, value in flags.items()}
    chosen = {
        **FLAGS,
        "actor.model_name_or_path": task / "model",
        "data.prompt_dataset": task / "train.jsonl",
        "ckpt.path": folder / "checkpoints",
        "ckpt.output_dir": folder / "model",
        **given,
    }
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"RAY_DEDUP_LOGS": "0", "COLUMNS": "2000"}
    environment.pop("RAY_ADDRESS", None)
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *_arguments(chosen)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def train(folder: Path, task: Path, *, timeout: float = 300, **flags: Any) -> Run:
    """Run to the end; a run that fails or takes longer fails the test with the end of its log."""
    process = start(folder, task, **flags)
    try:
        returncode = process.wait(timeout)
    finally:
        stop(process)
    run = Run(folder, returncode)
    assert returncode == 0, "\n".join(run.log.splitlines()[-40:])
    return run


def stop(process: subprocess.Popen) -> None:
    """End what is left of a run: the driver's group, and what Ray started outside it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def copy_checkpoint(run: Run, step: int, folder: Path) -> None:
    """Put a run's checkpoint of one step where a run in ``folder`` resumes from."""
    source, target = run.folder / "checkpoints" / "_actor", folder / "checkpoints" / "_actor"
    target.mkdir(parents=True)
    shutil.copytree(source / f"global_step{step}", target / f"global_step{step}")
    (target / "latest").write_text(f"global_step{step}")


def _arguments(flags: dict[str, Any]) -> list[str]:
    arguments = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            arguments += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return arguments


def _untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(TIMINGS)}


def _hash(folder: Path, pattern: str) -> str:
    paths = sorted(folder.glob(pattern))
    assert paths, f"nothing saved in {folder}"
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _tensors(value: Any) -> list[Any]:
    """All tensors in nested dictionaries and lists, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for child in children for tensor in _tensors(child)]
