"""Where DeepSpeed behaves otherwise on a CPU than on a GPU."""

from collections.abc import Callable
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


def partitioned_loading(config_class: Callable[[Any], Any], config: Any) -> Any:
    """What makes transformers load into partitioned parameters (ZeRO-3) for as long as it lives; None on CPU.

    Over gloo that loading leaves some parameters partly uninitialised now and then (seen with two ranks on a busy
    machine). Without it every rank loads the whole model, and DeepSpeed partitions it when it takes it over.
    """
    return None if ON_CPU else config_class(config)
