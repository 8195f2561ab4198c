"""Ends a run at the first update whose gradient is not finite, before anything is made of it."""

import math
import os
from typing import Any


def finite_step(engine: Any, args: Any) -> None:
    """Let a DeepSpeed engine make its step, and raise where the gradient of an optimizer step is not finite.

    DeepSpeed leaves the weights as they are then, and goes on; the next batch meets the same weights, so upstream would
    run to its end without learning anything. With fp16 it also looks for its loss scale in this way, and may go on.

    Raises:
        FloatingPointError: on every rank, since the norm is that of all.
    """
    skipped, steps = engine.skipped_steps, engine.global_steps
    engine.step()
    if engine.fp16_enabled() or engine.global_steps == steps:
        return
    norm = engine.get_global_grad_norm()
    if engine.skipped_steps > skipped or (norm is not None and not math.isfinite(norm)):
        raise FloatingPointError(
            f"the gradient of optimizer step {steps + 1} is not finite: the step was refused; {_resort(args)}"
        )


def _resort(args: Any) -> str:
    """Where a run can be taken up again."""
    folder = os.path.join(args.ckpt.path, "_actor")
    try:
        with open(os.path.join(folder, "latest"), encoding="utf-8") as file:
            return f"the last good checkpoint is {os.path.join(folder, file.read().strip())}"
    except OSError:
        return "there is no checkpoint yet"
