"""Block-quantized collectives for ZeRO: weights are all-gathered in 8 bits, gradients reduced in 4 bits (ZeRO++).

Wang et al. 2023, arXiv 2306.10209. Each block of values is sent as integers and one scale. All ranks, the sender
included, compute with the dequantized weights, so they see the same values. Sharded weights, optimizer moments and sums
are not quantized. Pass instances to FSDP2 as custom collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.parallel.blocking_collectives import all_gather_flat

BLOCK_SIZE = 256
WEIGHT_BITS, GRADIENT_BITS = 8, 4


def quantize(x: Tensor, bits: int) -> Tensor:
    """Quantize x [n, m] to bytes [n, k]: signed integers of 8 or 4 bits, then one fp32 scale per block of 256.

    The rounding error is at most half a step: the largest magnitude of the block divided by 254 (8 bits) or 14 (4
    bits).
    """
    num_rows, length = x.shape
    num_blocks = -(-length // BLOCK_SIZE)
    padded = x.new_zeros((num_rows, num_blocks * BLOCK_SIZE), dtype=torch.float32)
    padded[:, :length] = x
    values = padded.view(num_rows, num_blocks, BLOCK_SIZE)
    max_code = 2 ** (bits - 1) - 1
    scales = values.abs().amax(dim=-1, keepdim=True) / max_code
    codes = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8).view(num_rows, -1)
    if bits == 4:
        low, high = codes[:, ::2] & 15, codes[:, 1::2] & 15
        codes = low | (high << 4)
    return torch.cat((codes.view(torch.uint8), scales.view(num_rows, num_blocks).view(torch.uint8)), dim=1)


def dequantize(message: Tensor, length: int, bits: int) -> Tensor:
    """Dequantize n rows from `quantize` to fp32 [n, length]."""
    num_rows, num_blocks = message.shape[0], -(-length // BLOCK_SIZE)
    code_bytes = num_blocks * BLOCK_SIZE * bits // 8
    codes = message[:, :code_bytes].view(torch.int8)
    if bits == 4:
        # Shift left, then right, to extend the sign from 4 to 8 bits.
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1)
    scales = message[:, code_bytes:].contiguous().view(torch.float32)
    values = codes.reshape(num_rows, num_blocks, BLOCK_SIZE) * scales.unsqueeze(-1)
    return values.view(num_rows, -1)[:, :length]


def get_quantized_nbytes(length: int, bits: int) -> int:
    """Return the size in bytes of a quantized row of `length` values."""
    num_blocks = -(-length // BLOCK_SIZE)
    return num_blocks * (BLOCK_SIZE * bits // 8 + 4)


@dataclass
class QuantizedTraffic:
    """A counter of the bytes that this rank has sent in quantized collectives."""

    bytes: int = 0


class QuantizedComm:
    """A custom collective of FSDP2 that counts the bytes that it sends."""

    def __init__(self, traffic: QuantizedTraffic):
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor. Called by FSDP2."""
        return torch.empty(size, dtype=dtype, device=device)


class QuantizedAllGather(QuantizedComm):
    """A custom all-gather of weights for FSDP2."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [ranks * n] from `input_tensor` [n] of all ranks. Blocking."""
        message = quantize(input_tensor.view(1, -1), WEIGHT_BITS)
        num_ranks = dist.get_world_size(group)
        gathered = message.new_empty((num_ranks * message.shape[1],))
        all_gather_flat(gathered, message.view(-1), group)
        self._traffic.bytes += (num_ranks - 1) * message.numel()
        values = dequantize(gathered.view(num_ranks, -1), input_tensor.numel(), WEIGHT_BITS)
        output_tensor.view(num_ranks, -1).copy_(values)


class QuantizedReduceScatter(QuantizedComm):
    """A custom reduce-scatter of gradients for FSDP2: an all-to-all of quantized shards and a local sum in fp32."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [n] with the sum over ranks of the local shard of `input_tensor` [ranks * n]."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"quantized gradients can only be summed, not reduced by {op}")
        num_ranks = dist.get_world_size(group)
        message = quantize(input_tensor.view(num_ranks, -1), GRADIENT_BITS)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        self._traffic.bytes += (num_ranks - 1) * message.shape[1]
        output_tensor.view(-1).copy_(dequantize(received, output_tensor.numel(), GRADIENT_BITS).sum(dim=0))
