"""Block-quantized collectives for ZeRO: weights are all-gathered in 8 bits, gradients reduced in 4 bits (ZeRO++).

Wang et al. 2023, arXiv 2306.10209. Each block of values is sent as integers and one scale. All ranks, the sender
included, compute with the dequantized weights, so they see the same values. Sharded weights, optimizer moments and sums
are not quantized. Pass instances to FSDP2 as custom collectives.

Weights are sharded by rows, and blocks of weights lie within a row. So the dequantized weights do not depend on the
number of shards. Vectors, and matrices with short rows, are small: they are sent as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raytrain_hpc.parallel.blocking_collectives import all_gather_flat

BLOCK_SIZE = 256  # at most
WEIGHT_BITS, GRADIENT_BITS = 8, 4
_MIN_ROW_LENGTH = 32  # of weights that are quantized
_ALIGNMENT = 16  # bytes of which messages of weights are multiples, so that they can be viewed as any dtype


def quantize(x: Tensor, bits: int) -> Tensor:
    """Quantize x [n, m] to bytes [n, k]: signed integers of 8 or 4 bits, then one fp32 scale per block.

    Blocks have equal sizes, of at most 256 elements of a row. The rounding error is at most half a step: the largest
    magnitude of the block divided by 254 (8 bits) or 14 (4 bits).
    """
    num_rows, length = x.shape
    num_blocks, block_size = _split_row(length)
    padded = x.new_zeros((num_rows, num_blocks * block_size), dtype=torch.float32)
    padded[:, :length] = x
    values = padded.view(num_rows, num_blocks, block_size)
    max_code = 2 ** (bits - 1) - 1
    scales = values.abs().amax(dim=-1, keepdim=True) / max_code
    codes = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8).view(num_rows, -1)
    if bits == 4:
        low, high = codes[:, ::2] & 15, codes[:, 1::2] & 15
        codes = low | (high << 4)
    return torch.cat((codes.view(torch.uint8), scales.view(num_rows, num_blocks).view(torch.uint8)), dim=1)


def dequantize(message: Tensor, length: int, bits: int) -> Tensor:
    """Dequantize n rows from `quantize` to fp32 [n, length]."""
    num_rows, (num_blocks, block_size) = message.shape[0], _split_row(length)
    code_bytes = num_blocks * block_size * bits // 8
    codes = message[:, :code_bytes].view(torch.int8)
    if bits == 4:
        # Shift left, then right, to extend the sign from 4 to 8 bits.
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1)
    scales = message[:, code_bytes:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    values = codes.reshape(num_rows, num_blocks, block_size) * scales.unsqueeze(-1)
    return values.view(num_rows, -1)[:, :length]


def get_quantized_nbytes(length: int, bits: int) -> int:
    """Return the size in bytes of a quantized row of `length` values."""
    num_blocks, block_size = _split_row(length)
    return num_blocks * (block_size * bits // 8 + 4)


def _split_row(length: int) -> tuple[int, int]:
    """Return the number of blocks of a row, and their size: even, since two integers of 4 bits share a byte."""
    num_blocks = -(-length // BLOCK_SIZE)
    return num_blocks, -(-length // (2 * num_blocks)) * 2


def _get_row_length(shape: torch.Size) -> int:
    """Return the length of the rows of a weight that are quantized; 0: the weight is sent as it is."""
    length = shape[1:].numel() if len(shape) > 1 else 0
    return length if length >= _MIN_ROW_LENGTH else 0


@torch.no_grad()
def round_weight_(weight: Tensor) -> None:
    """Round a whole weight in place as an all-gather of its shards does."""
    if row_length := _get_row_length(weight.shape):
        rows = weight.view(-1, row_length)
        rows.copy_(dequantize(quantize(rows, WEIGHT_BITS), row_length, WEIGHT_BITS))


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
    """A custom all-gather of the weights of one FSDP2 module."""

    def __init__(self, shapes: Sequence[torch.Size], num_ranks: int, traffic: QuantizedTraffic):
        """Set up the gathers of shards of these shapes, with padding, from `num_ranks` ranks."""
        super().__init__(traffic)
        self._num_ranks, self._lengths = num_ranks, [shape.numel() for shape in shapes]
        self._row_lengths = [_get_row_length(shape) for shape in shapes]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [ranks * n] from `input_tensor` [n] of all ranks. Blocking.

        Groups of another size are those of `parallel.reshard_over`, whose weights were rounded before.
        """
        if dist.get_world_size(group) != self._num_ranks:
            all_gather_flat(output_tensor, input_tensor, group)
            return
        shards = list(zip(torch.split(input_tensor, self._lengths), self._row_lengths, strict=True))
        parts = [shard.view(torch.uint8) for shard, row_length in shards if not row_length]
        parts += [quantize(shard.view(-1, row), WEIGHT_BITS).view(-1) for shard, row in shards if row]
        message = torch.cat(parts)
        message = F.pad(message, (0, -message.numel() % _ALIGNMENT))
        gathered = message.new_empty(self._num_ranks * message.numel())
        all_gather_flat(gathered, message, group)
        self._traffic.bytes += (self._num_ranks - 1) * message.numel()
        self._unpack(gathered.view(self._num_ranks, -1), output_tensor)

    def _unpack(self, gathered: Tensor, output: Tensor) -> None:
        """Write the messages [ranks, bytes] of all ranks to `output` [ranks * n]."""
        targets = torch.split(output.view(self._num_ranks, -1), self._lengths, dim=1)
        start = 0
        for target, row_length in zip(targets, self._row_lengths, strict=True):
            if not row_length:
                end = start + target.shape[1] * target.itemsize
                target.copy_(gathered[:, start:end].view(target.dtype))
                start = end
        for target, row_length in zip(targets, self._row_lengths, strict=True):
            if row_length:
                num_rows, row_nbytes = target.shape[1] // row_length, get_quantized_nbytes(row_length, WEIGHT_BITS)
                end = start + num_rows * row_nbytes
                rows = gathered[:, start:end].reshape(-1, row_nbytes)
                target.copy_(dequantize(rows, row_length, WEIGHT_BITS).reshape(self._num_ranks, -1))
                start = end


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
