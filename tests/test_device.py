"""CPU as a device, and that CUDA is left exactly as it was."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.device import packing
from openrlhf.device.start import prepare, ray_options
from patches import build as builder
from patches.queue import load_series
from patches.release import Release, find_wheel, load_lock


def python(code, **environment):
    """Run code in a fresh process, whose device is decided by its environment."""
    import os

    variables = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**variables, **environment}, capture_output=True, text=True
    )


def test_without_the_switch_everything_is_upstreams():
    """GPU behaviour is unchanged by construction: the accelerator is torch.cuda, and every name comes back as given."""
    code = """
import torch
from openrlhf.device import accelerator, device_name, engine_options, tensor_parallel_executor, worker_extension
from openrlhf.device.distributed import partitioned_loading
from openrlhf.device.start import prepare, ray_options
from openrlhf.repeat.seeds import repeatable_optimizer
assert accelerator is torch.cuda
for function in (device_name, tensor_parallel_executor, worker_extension):
    assert function("as upstream has it") == "as upstream has it"
args, optimizer = object(), {"type": "AdamW", "params": {"lr": 1.0}}
assert prepare(args) is args
assert ray_options(args) == {} and engine_options() == {}
assert partitioned_loading(list, "ab") == ["a", "b"]
assert repeatable_optimizer(optimizer) is optimizer
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_every_call_that_upstream_makes_exists_on_cuda_and_on_cpu():
    """Names are collected from the patched modules, so that a new release's new call is seen here."""
    series = load_series()
    release = Release(find_wheel(series.upstream, None))
    names = set()
    for text in builder.patched_sources(series, release, load_lock(series.upstream)).values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "accelerator":
                names.add(node.attr)
    assert {"current_device", "synchronize"} <= names
    code = (
        f"from openrlhf.device import accelerator; print([n for n in {sorted(names)} if not hasattr(accelerator, n)])"
    )
    for environment in ({}, {"DS_ACCELERATOR": "cpu"}):
        assert python(code, **environment).stdout.strip() == "[]"


masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5).filter(any), min_size=1, max_size=4)


@given(masks, st.integers(0, 2**31))
def test_packing_is_its_loop_and_its_inverse(mask, seed):
    torch.manual_seed(seed)
    attention_mask = torch.tensor(mask, dtype=torch.long)
    hidden = torch.randn(*attention_mask.shape, 3)
    packed, indices, cumulative, longest, lengths = packing.unpad_input(hidden, attention_mask)
    rows = [hidden[i, j] for i, row in enumerate(mask) for j, kept in enumerate(row) if kept]
    assert torch.equal(packed, torch.stack(rows))
    assert lengths.tolist() == [sum(row) for row in mask] and longest == max(lengths)
    assert cumulative.tolist() == [sum(map(sum, mask[:i])) for i in range(len(mask) + 1)]
    padded = packing.pad_input(packed, indices, len(mask), 5)
    assert torch.equal(padded, hidden * attention_mask.unsqueeze(-1))
    assert torch.equal(packing.index_first_axis(hidden.flatten(0, 1), indices), packed)


def test_packing_passes_gradients_to_the_tokens_that_are_kept():
    hidden = torch.randn(2, 3, 1, dtype=torch.double, requires_grad=True)
    attention_mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    packed, indices, *_ = packing.unpad_input(hidden, attention_mask)
    packing.pad_input(packed, indices, 2, 3).sum().backward()
    assert torch.equal(hidden.grad.squeeze(-1), attention_mask.double())


def arguments(**changes):
    nested = {
        "actor": {"num_nodes": 1, "num_gpus_per_node": 2, "optim": "adam"},
        "ref": {"num_nodes": 1, "num_gpus_per_node": 2},
        "critic": {"model_name_or_path": None, "optim": "adam", "num_nodes": 1, "num_gpus_per_node": 8},
        "reward": {"remote_url": ["f.py"], "num_nodes": 1, "num_gpus_per_node": 8},
        "algo": {"kl": {"init_coef": 0.0}},
        "vllm": {
            "enable_sleep": False,
            "sync_with_ray": False,
            "sync_backend": "nccl",
            "gpu_memory_utilization": 0.95,
            "num_engines": 2,
            "tensor_parallel_size": 2,
        },
        "ds": {
            "enable_sleep": False,
            "load_in_4bit": False,
            "use_liger_kernel": False,
            "adam_offload": False,
            "deepcompile": False,
            "ring_attn_size": 1,
            "tensor_parallel_size": 1,
            "attn_implementation": "flash_attention_2",
        },
    }
    for flag, value in changes.items():
        section, name = flag.split("__")
        nested[section][name] = value

    def build(value):
        return SimpleNamespace(**{k: build(v) for k, v in value.items()}) if isinstance(value, dict) else value

    return build(nested)


def test_on_cpu_gpu_settings_become_fit_and_are_told(capsys):
    args = prepare(arguments())
    assert (args.vllm.sync_backend, args.ds.attn_implementation) == ("gloo", "sdpa")
    assert args.vllm.gpu_memory_utilization < 0.5
    assert "--ds.attn_implementation sdpa instead of flash_attention_2" in capsys.readouterr().out


def test_on_cpu_what_cannot_work_is_refused_all_at_once():
    with pytest.raises(SystemExit) as error:
        prepare(arguments(vllm__enable_sleep=True, ds__ring_attn_size=2, actor__optim="muon"))
    for flag in ("--vllm.enable_sleep", "--ds.ring_attn_size 2", "--actor.optim muon"):
        assert flag in str(error.value)


def test_as_many_pretend_gpus_as_upstream_asks_for(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_options(arguments())["num_gpus"] == 2 + 2 * 2
    args = arguments(critic__model_name_or_path="m")
    args.algo.kl.init_coef = 0.1
    assert ray_options(args)["num_gpus"] == 2 + 2 + 8 + 2 * 2
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_options(args) == {}
