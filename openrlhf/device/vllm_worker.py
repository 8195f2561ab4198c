"""Receives the actor's weights inside a vLLM worker on CPU.

vLLM's CPU linears repack their weights when the model is loaded and drop the originals, so that no parameter can be
written in place. The tensors of one round are collected and loaded together; the output matrix of a model with tied
embeddings is repacked after that, which vLLM's reload leaves out (measured: mean |Δ log p| .496 against transformers
without it).
"""

from typing import TYPE_CHECKING, Any

import torch

from openrlhf.device.weight_sync import GlooGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM imports this module in each CPU worker before it chooses kernels. Its AMX attention ends in an illegal
# instruction on virtual machines that report AMX as usable (seen on Sapphire Rapids); its other kernels do not.
torch.cpu._is_amx_tile_supported = lambda: False


def load_round(worker: Any, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Load one complete round of full, unsharded tensors, by Hugging Face name, into a CPU worker's model."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        worker.model_runner.reload_weights(weights_iterator=iter(weights))
        for module in worker.model_runner.model.modules():
            if hasattr(module, "cpu_linear") and module.weight.numel() > 0:
                module.quant_method.process_weights_after_loading(module)


class CpuWorkerWrap:
    """Mixed into vLLM's worker class; upstream's engine actor calls these methods by name on every worker."""

    vllm_config: "VllmConfig"
    model_config: Any

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        """Join the group of weight sync; the actor's rank 0 waits for all workers in it."""
        if use_ray:
            raise ValueError("--vllm.sync_with_ray: Ray's gloo collectives collide with torch's default group on CPU")
        rank = torch.distributed.get_rank() + rank_offset
        self._sync_group = GlooGroup(master_address, master_port, rank, world_size)
        self._round: list[tuple[str, torch.Tensor]] = []

    def update_weight(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool = False) -> None:
        """Receive one tensor; ``empty_cache`` marks the last of a round, which loads the round."""
        if dtype != self.model_config.dtype:
            raise ValueError(f"weight {name} is sent as {dtype}, the engine holds {self.model_config.dtype}")
        weight = torch.empty(shape, dtype=dtype)
        self._sync_group.broadcast(weight, src=0)
        self._round.append((name, weight))
        if empty_cache:
            weights, self._round = self._round, []
            load_round(self, weights)
