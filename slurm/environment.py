"""The environment of the trainer: what is set for it, and what little of the user's reaches it."""

import os
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from slurm.config import Launch

RUN_MARK = "OPENRLHF_RUN_FOLDER"
"""Names the run in the environment of each of its processes, so that they can be found again."""

INHERITED = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TERM", "TMPDIR", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CC", "CXX", "VIRTUAL_ENV"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN", "HF_ENDPOINT"),
    *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "RAY_TMPDIR"),
    *("NCCL_*", "GLOO_*", "WANDB_*"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE"),
)
"""Nothing else: an inherited RAY_ADDRESS would join someone's cluster, a PYTHONPATH run someone's modules."""

ALWAYS = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

# One thread each, since actor and engines share the cores; vLLM would otherwise bind threads to cores of its own,
# and in a process of its own would not find the device that is set here.
CPU = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def trainer_environment(launch: Launch, owner: Path, of: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All of it, given the user's variables `of`."""
    # CUDA_VISIBLE_DEVICES counts where there is CUDA; on CPU even an empty one keeps Ray from starting.
    allowed = (*INHERITED, "CUDA_VISIBLE_DEVICES") if launch.device == "cuda" else INHERITED
    inherited = {name: value for name, value in of.items() if any(fnmatchcase(name, pattern) for pattern in allowed)}
    return inherited | chosen(launch, owner)


def chosen(launch: Launch, owner: Path) -> dict[str, str]:
    """What is set for processes of `owner`, a run folder; holds no secret, so it can be recorded."""
    # DeepSpeed compiles its CPU ops with the ninja that lies beside the interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    device = CPU if launch.device == "cpu" else {}
    return {**ALWAYS, **device, **(OFFLINE if launch.offline else {}), "PATH": path, RUN_MARK: str(owner)}
