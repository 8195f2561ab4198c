"""A dense reward for tests of the machinery: the share of digits among the response's characters."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([sum(map(str.isdigit, text)) / max(len(text), 1) for text in responses])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards}}
