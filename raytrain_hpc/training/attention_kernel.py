"""Which kernel computes scaled dot-product attention on a GPU: chosen for the process, and named in the log."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from torch.nn import attention

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.training_config import TrainConfig, computes_in_bf16
from raytrain_hpc.parallel.precision import get_param_dtype
from raytrain_hpc.torch_device import enable_cudnn_attention, has_attention_kernels, has_flash_attention_3
from raytrain_hpc.torch_private import choose_attention_kernel, set_attention_kernel_order

_log = logging.getLogger(__name__)
_FLASH_3 = "flash_attn_interface"  # the module that FlashAttention-3 installs


def configure_attention(device: torch.device, *, uses_mask: bool) -> None:
    """Set the order in which this process tries the kernels of a GPU. Other devices leave nothing to choose.

    FlashAttention-3 if it is installed, else cuDNN, which is as fast on Hopper, then FlashAttention-2. `uses_mask`:
    attention gets a mask. Then cuDNN is left out: on H100 and H200 its backward pass gives NaN with a mask if the
    sequence is 64 modulo 128 long (torch 2.11 and later, pytorch issue 196678).
    """
    if not has_attention_kernels(device):
        return
    enable_cudnn_attention(not uses_mask)
    order = ["cudnn", "flash", "efficient", "math"]
    if find_spec(_FLASH_3) is not None and has_flash_attention_3(device):
        attention.activate_flash_attention_impl("FA3")
        order = ["flash", "cudnn", "efficient", "math"]
    set_attention_kernel_order(order)


def log_attention_kernel(spec: ModelSpec, train: TrainConfig, device: torch.device) -> None:
    """Log the kernel that computes causal attention over whole sequences, without a mask."""
    dtype = torch.bfloat16 if computes_in_bf16(train.dtype) else get_param_dtype(train.dtype)
    q, k = (
        torch.empty(1, heads, train.seq_len, spec.head_dim, dtype=dtype, device=device)
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    _log.info("attention kernel: %s", choose_attention_kernel(q, k))
