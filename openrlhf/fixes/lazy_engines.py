"""Stands in for two imports of ``openrlhf.trainer.ray`` that would load vLLM into every actor.

Importing vLLM takes seconds and hundreds of megabytes in each process, and only the driver, the trainer and the engines
use it.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The module attribute hook (PEP 562) of ``openrlhf.trainer.ray``: import the engines when they are asked for."""
    if name in ("create_vllm_engines", "batch_vllm_engine_call"):
        return getattr(importlib.import_module("openrlhf.trainer.ray.vllm_engine"), name)
    raise AttributeError(f"module 'openrlhf.trainer.ray' has no attribute {name!r}")
