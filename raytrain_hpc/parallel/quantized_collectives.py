"""Block-quantised collectives for ZeRO: weights gathered in 8 bits, gradients reduced in 4 (ZeRO++).

Wang et al. 2023, arXiv 2306.10209. Each block of values travels as whole numbers and one scale. Every rank, the sender
too, computes with what the receivers get, so all ranks see the same weights; sharded weights, moments and sums stay
exact. Instances go to FSDP2 as its custom collectives.
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
    """Rows of x [n, m] as bytes [n, k]: per block of 256 whole numbers of 8 or 4 bits, then fp32 scales.

    A value is off by at most half a step: the largest of its block over 254, or over 14.
    """
    rows, length = x.shape
    blocks = -(-length // BLOCK_SIZE)
    padded = x.new_zeros((rows, blocks * BLOCK_SIZE), dtype=torch.float32)
    padded[:, :length] = x
    values = padded.view(rows, blocks, BLOCK_SIZE)
    most = 2 ** (bits - 1) - 1
    scales = values.abs().amax(dim=-1, keepdim=True) / most
    codes = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8).view(rows, -1)
    if bits == 4:
        low, high = codes[:, ::2] & 15, codes[:, 1::2] & 15
        codes = low | (high << 4)
    return torch.cat((codes.view(torch.uint8), scales.view(rows, blocks).view(torch.uint8)), dim=1)


def dequantize(message: Tensor, length: int, bits: int) -> Tensor:
    """fp32 [n, length] of what `quantise` made of n rows."""
    rows, blocks = message.shape[0], -(-length // BLOCK_SIZE)
    packed = blocks * BLOCK_SIZE * bits // 8
    codes = message[:, :packed].view(torch.int8)
    if bits == 4:
        # Shifted up and down again, so that the sign of four bits becomes that of eight.
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1)
    scales = message[:, packed:].contiguous().view(torch.float32)
    values = codes.reshape(rows, blocks, BLOCK_SIZE) * scales.unsqueeze(-1)
    return values.view(rows, -1)[:, :length]


def get_quantized_nbytes(length: int, bits: int) -> int:
    """Bytes that so many values travel in."""
    blocks = -(-length // BLOCK_SIZE)
    return blocks * (BLOCK_SIZE * bits // 8 + 4)


@dataclass
class QuantizedTraffic:
    """Bytes that this rank sent."""

    bytes: int = 0


class _QuantizedComm:
    def __init__(self, traffic: QuantizedTraffic):
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What FSDP2 asks for: an ordinary buffer."""
        return torch.empty(size, dtype=dtype, device=device)


class QuantizedAllGather(_QuantizedComm):
    """Instead of FSDP2's all-gather of weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [ranks * n] from every rank's `input_tensor` [n]; done when it returns."""
        message = quantize(input_tensor.view(1, -1), WEIGHT_BITS)
        ranks = dist.get_world_size(group)
        gathered = message.new_empty((ranks * message.shape[1],))
        all_gather_flat(gathered, message.view(-1), group)
        self._traffic.bytes += (ranks - 1) * message.numel()
        values = dequantize(gathered.view(ranks, -1), input_tensor.numel(), WEIGHT_BITS)
        output_tensor.view(ranks, -1).copy_(values)


class QuantizedReduceScatter(_QuantizedComm):
    """Instead of FSDP2's reduce-scatter of gradients: shards change hands, and each rank sums its own in fp32."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [n] with the sum of every rank's part of `input_tensor` [ranks * n]."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"quantised gradients can be summed, not reduced by {op}")
        ranks = dist.get_world_size(group)
        message = quantize(input_tensor.view(ranks, -1), GRADIENT_BITS)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        self._traffic.bytes += (ranks - 1) * message.shape[1]
        output_tensor.view(-1).copy_(dequantize(received, output_tensor.numel(), GRADIENT_BITS).sum(dim=0))
