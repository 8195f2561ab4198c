"""Seeds derived from the run's seed and the place where they are used."""

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from openrlhf.device import ON_CPU

if TYPE_CHECKING:
    from vllm import SamplingParams


def derive(*parts: int | str) -> int:
    """63 bits of a hash of the parts: different parts give unrelated seeds, and none overflows an int64."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def for_sample(params: "SamplingParams", index: int) -> "SamplingParams":
    """Sampling parameters of one of a prompt's samples: a copy of its own, since executors write into them.

    Args:
        params: of the draw; its seed, if it has one, is the draw's.
        index: number of the sample within the draw, or number of tokens before a turn of it. Equal seeds would make all
            samples of a prompt copies, and give every turn of an agent the same noise.
    """
    own = params.clone()
    if params.seed is not None:
        own.seed = derive(params.seed, index)
    return own


def update_generator(strategy: Any, model: Any) -> torch.Generator:
    """Generator of an update's shuffle, and the seed of all else that is random in it (dropout).

    It depends on the run's seed and on how many optimizer steps the model has made, which its checkpoint restores; the
    state of a global generator would be lost.

    Args:
        strategy: upstream's strategy, for the run's seed and the rank.
        model: a DeepSpeed engine, or upstream's actor around one.
    """
    import deepspeed

    engine = model if isinstance(model, deepspeed.DeepSpeedEngine) else model.model
    seed = derive(strategy.args.train.seed, "update", engine.global_steps, strategy.get_rank())
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def repeatable_optimizer(optimizer: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's optimizer section with torch's Adam on CPU; unchanged on CUDA.

    DeepSpeed's CPU Adam holds β^t as a running product and starts a resumed run from pow(β, t), which rounds
    differently: the weights drift apart although every metric agrees for some steps.
    """
    if not ON_CPU or optimizer["type"] != "AdamW":
        return optimizer
    return {**optimizer, "params": {**optimizer["params"], "torch_adam": True}}
