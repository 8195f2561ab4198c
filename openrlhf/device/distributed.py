"""Start of torch's process group through DeepSpeed."""

from typing import Any

import deepspeed

from openrlhf.device import ON_CPU


def init_distributed(**kwargs: Any) -> None:
    """``deepspeed.init_distributed``, on CPU without its shared-memory operator.

    The operator serves tensor-parallel inference only, and DeepSpeed would compile it on first use, taking minutes.
    """
    if ON_CPU:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(**kwargs)
