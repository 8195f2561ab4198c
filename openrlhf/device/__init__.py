"""CPU as a first-class device.

DeepSpeed's own switch decides: with ``DS_ACCELERATOR=cpu`` in the environment the whole trainer runs on the CPU, in
every other case ``accelerator`` *is* ``torch.cuda`` and every function of this package returns what upstream would have
used, so that GPU behaviour is unchanged by construction. A node whose GPU driver is broken therefore fails as it does
upstream, and does not train on its CPU unnoticed.
"""

import os
from typing import Any

import torch

ON_CPU: bool = os.environ.get("DS_ACCELERATOR") == "cpu"


class _CpuAccelerator:
    """What upstream calls of ``torch.cuda``, on a machine that has one device and no streams."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def set_device(device: int) -> None:
        """There is one CPU device; nothing to choose."""

    @staticmethod
    def empty_cache() -> None:
        """The CPU allocator keeps no cache."""

    @staticmethod
    def synchronize() -> None:
        """CPU operations are synchronous."""

    @staticmethod
    def current_stream() -> None:
        """There are no streams; who takes a stream here must accept None."""


accelerator: Any = _CpuAccelerator() if ON_CPU else torch.cuda


def device_name(cuda_name: str) -> str:
    """The device that upstream calls ``cuda_name`` (``"cuda"``, ``"cuda:0"``): the same name, or ``"cpu"``."""
    return "cpu" if ON_CPU else cuda_name


def worker_extension(cuda_class: str) -> str:
    """Import path of the class that receives weights in vLLM's workers; ``cuda_class`` is upstream's."""
    return "openrlhf.device.vllm_worker.CpuWorkerWrap" if ON_CPU else cuda_class


def tensor_parallel_executor(cuda_executor: str) -> str:
    """vLLM's executor for tensor-parallel engines; its Ray executor places workers by GPU and refuses a CPU."""
    return "mp" if ON_CPU else cuda_executor


def engine_options() -> dict[str, Any]:
    """Further options of a vLLM engine. On CPU a request with a seed cannot be prefilled in chunks (vLLM 0.29)."""
    return {"enable_chunked_prefill": False} if ON_CPU else {}
