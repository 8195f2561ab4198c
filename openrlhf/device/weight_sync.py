"""The process group over which the actor's rank 0 sends new weights to the vLLM workers.

On CUDA it is upstream's NCCL group; on CPU a gloo group that stands beside torch.distributed's global state, because
both ends already have a default group of their own.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.device import ON_CPU

# A peer that never comes is reported by the watch within a minute; this only bounds what is left behind.
TIMEOUT = timedelta(minutes=10)


class GlooGroup:
    """Broadcasts between processes that share no default group.

    Args:
        address, port: where rank 0 listens for the others.
        rank, world_size: of this process in the group; rank 0 is the sender.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        prefixed = dist.PrefixStore("weight_sync", store)
        self._group: dist.ProcessGroup = dist.ProcessGroupGloo(prefixed, rank, world_size, TIMEOUT)  # type: ignore[assignment]

    def broadcast(self, tensor: torch.Tensor, src: int, stream: None = None) -> None:
        """Fill ``tensor`` on every rank with that of rank ``src``; any shape and dtype. Blocks until done."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        # As bytes: gloo knows fewer dtypes than models have.
        self._group.broadcast([tensor.detach().contiguous().view(-1).view(torch.uint8)], options).wait()


def weight_sync_group(address: str, port: int, rank: int, world_size: int, device: Any) -> Any:
    """The group for this device; it has ``broadcast(tensor, src, stream)``."""
    if ON_CPU:
        return GlooGroup(address, port, rank, world_size)
    from openrlhf.utils.distributed_util import stateless_init_process_group

    return stateless_init_process_group(address, port, rank, world_size, device)
