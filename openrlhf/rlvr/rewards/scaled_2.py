"""A right answer is paid 2."""

from functools import partial

from openrlhf.rlvr.rewards.scaled import scaled

reward_func = partial(scaled, 2)
