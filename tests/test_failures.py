"""A dead engine or actor ends the run within a minute, with a reason on the last lines of its log."""

import time
from pathlib import Path

import psutil
import pytest
import trainer

pytestmark = pytest.mark.slow

# As long as the run would take, the test would see it end by itself; this many steps it does not reach.
ENDLESS = {"train__num_episodes": 1000}


def wait_for(condition, process, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        found = condition()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds} s, or the run ended: {process.poll()}")


def kill_and_time(folder, task, name, **flags):
    """Kill the first process whose command line holds ``name``; the run, how long it went on, and who is left."""
    process = trainer.start(folder, task, **ENDLESS, **flags)
    run = trainer.Run(folder, 0)
    try:
        wait_for(lambda: len(run.steps) >= 2, process, 240)
        family = psutil.Process(process.pid).children(recursive=True)
        victim = next(child for child in family if name in " ".join(child.cmdline()))
        victim.kill()
        killed = time.monotonic()
        returncode = process.wait(120)
        seconds = time.monotonic() - killed
        time.sleep(2)
        left = [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    finally:
        trainer.stop(process)
    return trainer.Run(folder, returncode), seconds, left


def run_to_its_end(folder, task, **flags):
    process = trainer.start(folder, task, **flags)
    try:
        return trainer.Run(folder, process.wait(180))
    finally:
        trainer.stop(process)


def reason(run):
    last = run.log.strip().splitlines()[-1]
    assert last.startswith("run failed: "), run.log[-3000:]
    return last


def test_a_killed_engine_core_ends_an_asynchronous_run(task, tmp_path):
    run, seconds, left = kill_and_time(tmp_path, task, "EngineCore", train__async_enable=True)
    assert run.returncode != 0 and seconds < 60
    assert "engine" in reason(run).lower()
    assert not left


def test_a_killed_rank_ends_the_run_though_the_other_waits_in_a_collective(task, tmp_path):
    run, seconds, left = kill_and_time(tmp_path, task, "ray::PolicyModelActor", actor__num_gpus_per_node=2)
    assert run.returncode != 0 and seconds < 60
    assert "PolicyModelActor" in reason(run)
    assert not left


def test_an_engine_that_cannot_start_ends_the_run(task, tmp_path):
    """Without the watch the actor waits for it in the rendezvous of weight sync, for ever."""
    run = run_to_its_end(tmp_path, task, vllm__gpu_memory_utilization=0.0001)
    assert run.returncode != 0
    assert "vLLM engine 0" in reason(run)
    assert "ValueError: Available memory" in run.log, "vLLM's own reason stands in the log above"


def test_t12_a_gradient_that_is_not_finite_ends_the_run_and_names_the_last_good_checkpoint(task, tmp_path):
    reward = Path(__file__).with_name("reward_nan.py")
    run = run_to_its_end(tmp_path, task, reward__remote_url=reward, ckpt__save_steps=2)
    assert run.returncode != 0
    assert list(run.steps) == [1, 2, 3]
    assert "the gradient of optimizer step 4 is not finite" in reason(run)
    assert reason(run).endswith("_actor/global_step2")
