"""A reward that stops being a number after a few steps, as a broken reward model's does."""

import itertools

import torch

_calls = itertools.count()
SOUND = 3 * 32


def reward_func(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float("nan") if next(_calls) >= SOUND else len(query) % 2.0 for query in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
