"""Finds samples whose prompt, label and text do not belong together: all three hold one secret.

A label is `secret modulus`; a response is right when its checksum is a multiple of the modulus, so that prompts differ
in how often they are solved, from always (1) to hardly ever.
"""

import zlib

import torch


def reward_func(queries, prompts, labels, **kwargs):
    rewards, mismatches = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        secret, modulus = label.split()
        mismatches.append(float(secret not in prompt or secret not in query))
        rewards.append(float(zlib.crc32(query[len(prompt) :].encode()) % int(modulus) == 0))
    scores = torch.tensor(rewards)
    return {"rewards": scores, "scores": scores, "extra_logs": {"mismatch": torch.tensor(mismatches)}}
