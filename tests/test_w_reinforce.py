"""W-REINFORCE's two advantages."""

import pytest
import torch

from openrlhf.rlvr.w_reinforce import WReinforce, w_reinforce

PENALTIES = ("reward.overlong_buffer_len", "reward.stop_properly_penalty_coef")


def test_a_tenth_for_a_right_sample_and_minus_one_for_a_wrong_one():
    correct = torch.tensor([True, False, True])
    assert w_reinforce(correct, WReinforce()).tolist() == pytest.approx([0.1, -1.0, 0.1])
    valid = torch.tensor([True, True, False])
    assert w_reinforce(correct, WReinforce(1.0, -0.5), valid).tolist() == [1.0, -0.5, 0.0]
    assert w_reinforce(correct[:0], WReinforce()).shape == (0,)
    assert w_reinforce(correct, WReinforce()).dtype == torch.float32


@pytest.mark.parametrize(
    ("own", "given", "named"),
    [
        (WReinforce(positive=-1.0), {"reward.remote_url": "r.py"}, ["--algo.w_reinforce.negative", ".positive"]),
        (WReinforce(), {}, ["--algo.advantage.estimator w_reinforce", "--reward.remote_url"]),
        *((WReinforce(), {"reward.remote_url": "r.py", name: 1.0}, [f"--{name}"]) for name in PENALTIES),
    ],
)
def test_senseless_settings_are_refused_by_name(own, given, named):
    unset = ("reward.remote_url", "train.agent_func_path", *PENALTIES)
    flags = {"algo.advantage.estimator": "w_reinforce", **dict.fromkeys(unset)}
    (problem,) = own.problems(flags | given)
    assert all(name in problem for name in named)
    assert own.problems(flags | {"algo.advantage.estimator": "rloo"}) == []
    assert WReinforce().problems(flags | {"train.agent_func_path": "agent.py"}) == []
