"""What upstream imports from flash-attn: flash-attn's own on CUDA, plain torch on CPU."""

from einops import rearrange

from openrlhf.device import ON_CPU

if ON_CPU:
    from openrlhf.device.packing import all_gather, index_first_axis, pad_input, unpad_input
else:
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # type: ignore[no-redef]
    from flash_attn.utils.distributed import all_gather  # type: ignore[no-redef]

__all__ = ["all_gather", "index_first_axis", "pad_input", "rearrange", "unpad_input"]
