"""Reward functions for `--reward.remote_url`: one file each, with a `reward_func` that the engines load by its path."""
