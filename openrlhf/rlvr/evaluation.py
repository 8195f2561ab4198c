"""Evaluation before the first and after the last step, so that a run says by itself what it gained."""

import time
from typing import Any

import ray

from openrlhf.rlvr.flags import flag, settings


@settings("eval")
class Evaluation:
    """When to evaluate, beside every ``--eval.steps`` steps."""

    at_start: bool = flag(False, "evaluate before the first step of a run that does not resume")
    at_end: bool = flag(False, "evaluate after the last step, unless that step was evaluated")

    def problems(self, flags: dict[str, Any]) -> list[str]:
        names = [f"--eval.{name}" for name in ("at_start", "at_end") if getattr(self, name)]
        found = []
        if names and not flags["eval.dataset"]:
            found.append(f"{' and '.join(names)}: nothing to evaluate; set --eval.dataset")
        if names and not (flags["logger.metrics_path"] or flags["logger.tensorboard_dir"]):
            found.append(f"{' and '.join(names)}: set --logger.metrics_path or --logger.tensorboard_dir for the result")
        if self.at_end and flags["logger.logging_steps"] != 1:
            found.append("--eval.at_end: set --logger.logging_steps 1, or the last step is not known")
        return found


def fit(trainer: Any, args: Any) -> None:
    """Train to the end, with the evaluations that the flags ask for; ``trainer`` is upstream's trainer actor.

    The last evaluation goes to the metrics file and TensorBoard only: upstream has closed Weights & Biases by then.
    """
    wanted: Evaluation = Evaluation.of(args)  # type: ignore[attr-defined]
    if wanted.at_start:
        ray.get(trainer.__ray_call__.remote(_evaluate_at_start))
    ray.get(trainer.fit.remote())
    if wanted.at_end:
        ray.get(trainer.__ray_call__.remote(_evaluate_at_end))


def _evaluate_at_start(trainer: Any) -> None:
    states = _on_logger(trainer, lambda logging: logging.init_checkpoint_states())
    if states["global_step"] == 0:
        _evaluate(trainer, 0)


def _evaluate_at_end(trainer: Any) -> None:
    last = _on_logger(trainer, lambda logging: logging.tensorboard_logger.last_step)
    if "train" in last and last.get("eval") != last["train"]:
        _evaluate(trainer, last["train"], closed=True)


def _evaluate(trainer: Any, step: int, closed: bool = False) -> None:
    """Evaluate on the synchronous trainer itself or on the generator of the asynchronous one, and log the result."""
    started = time.time()
    if hasattr(trainer, "generator_actor"):
        metrics = ray.get(trainer.generator_actor._run_eval.remote())
    else:
        from openrlhf.trainer.ppo_trainer import compute_eval_metrics

        evaluation = trainer.args.eval
        count = evaluation.n_samples_per_prompt
        overrides = {"temperature": evaluation.temperature, "n_samples_per_prompt": count}
        samples = trainer.samples_generator.generate_eval_samples(**{**trainer.generate_kwargs, **overrides})
        metrics = compute_eval_metrics(trainer.eval_dataloader, samples, count)
    metrics["timing/evaluation"] = time.time() - started

    def log(logging: Any) -> None:
        trackers = [logging.tensorboard_logger, None if closed else logging.wandb_logger]
        for tracker in filter(None, trackers):
            tracker.log_eval(step, metrics)

    _on_logger(trainer, log)


def _on_logger(trainer: Any, function: Any) -> Any:
    """Run a function on the object that holds the loggers and checkpoint states."""
    if hasattr(trainer, "trainer_actor"):
        return ray.get(trainer.trainer_actor.__ray_call__.remote(function))
    return function(trainer)
