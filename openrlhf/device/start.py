"""What starting a run on the CPU needs beyond upstream's flags; on CUDA both functions change nothing."""

import os
from types import SimpleNamespace
from typing import Any

from openrlhf.device import ON_CPU

# Where a setting of a GPU has no meaning the run says so instead of ignoring it.
_REFUSED = {
    "vllm.enable_sleep": "a CPU engine has no memory to give back",
    "ds.enable_sleep": "a CPU actor has no memory to give back",
    "ds.load_in_4bit": "bitsandbytes kernels need a GPU",
    "ds.use_liger_kernel": "Liger kernels need a GPU",
    "ds.adam_offload": "the optimizer is on the CPU already",
    "ds.deepcompile": "DeepCompile needs a GPU",
    "vllm.sync_with_ray": "Ray's gloo collectives collide with torch's default group",
}
_AT_MOST_ONE = {"ds.ring_attn_size": "ring attention needs flash-attn", "ds.tensor_parallel_size": "not run on CPU"}

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def prepare(args: SimpleNamespace) -> SimpleNamespace:
    """Check and complete the parsed flags before anything is started; returns the same object.

    Raises:
        SystemExit: flags that cannot work on a CPU, all of them named.
    """
    if not ON_CPU:
        return args
    problems = [f"--{flag}: {why}" for flag, why in _REFUSED.items() if _get(args, flag)]
    problems += [f"--{flag} {_get(args, flag)}: {why}" for flag, why in _AT_MOST_ONE.items() if _get(args, flag) > 1]
    problems += [
        f"--{role}.optim muon: not run on CPU" for role in ("actor", "critic") if _get(args, f"{role}.optim") == "muon"
    ]
    if problems:
        raise SystemExit("not possible with DS_ACCELERATOR=cpu:\n  " + "\n  ".join(problems))
    # Workers inherit the environment of the Ray processes that this one starts.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _replace(args, "vllm.sync_backend", "nccl", "gloo")
    _replace(args, "vllm.gpu_memory_utilization", 0.95, 0.05)
    if "flash_attention" in args.ds.attn_implementation:
        _replace(args, "ds.attn_implementation", args.ds.attn_implementation, "sdpa")
    return args


def ray_options(args: SimpleNamespace) -> dict[str, Any]:
    """Further arguments for ``ray.init``: on a CPU without a running cluster, a private one with pretend GPUs.

    Upstream reserves a GPU for each rank and engine; Ray only counts them, so as many are declared as it will ask for.
    """
    if not ON_CPU or os.environ.get("RAY_ADDRESS"):
        return {}
    ranks = [args.actor.num_nodes * args.actor.num_gpus_per_node]
    if args.algo.kl.init_coef > 0:
        ranks.append(args.ref.num_nodes * args.ref.num_gpus_per_node)
    if args.critic.model_name_or_path:
        ranks.append(args.critic.num_nodes * args.critic.num_gpus_per_node)
    if not args.reward.remote_url:
        ranks.append(args.reward.num_nodes * args.reward.num_gpus_per_node)
    gpus = sum(ranks) + (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    return {
        "address": "local",
        "num_gpus": gpus,
        # Each bundle takes a CPU, and the trainers and queues take some besides.
        "num_cpus": 2 * gpus + 6,
        "include_dashboard": False,
        "object_store_memory": 512 * 1024**2,
        "_node_ip_address": "127.0.0.1",
    }


def _get(args: SimpleNamespace, flag: str) -> Any:
    value: Any = args
    for part in flag.split("."):
        value = getattr(value, part)
    return value


def _replace(args: SimpleNamespace, flag: str, unfit: Any, fit: Any) -> None:
    """Replace a value that only makes sense on a GPU, and say so."""
    if _get(args, flag) == unfit:
        section, name = flag.rsplit(".", 1)
        setattr(_get(args, section), name, fit)
        print(f"DS_ACCELERATOR=cpu: --{flag} {fit} instead of {unfit}")
