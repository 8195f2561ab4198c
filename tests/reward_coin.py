"""A verdict for tests of the machinery, right for about half of all different responses: whether a checksum is even."""

import zlib

import torch


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([float(zlib.crc32(text.encode()) % 2 == 0) for text in responses])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards}}
