"""All-gathers of FSDP2 in which the weights of float8 products travel in float8: half the bytes of bf16, same results.

A weight is quantized by its shards with the scale of the whole tensor, whose largest magnitude takes one small
all-reduce per all-gather. FSDP2 gets the rounded numbers in bf16, which represents them exactly: scales are powers of
two. The linear layer quantizes them again, which changes nothing, for the same reason. Its products are therefore bit
for bit those of weights that were gathered in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raytrain_hpc.model.decoder import Head
from raytrain_hpc.parallel.blocking_collectives import all_gather_flat
from raytrain_hpc.parallel.float8_linear import cast_scaled, compute_scales, is_float8
from raytrain_hpc.parallel.quantized_collectives import QuantizedComm, QuantizedTraffic
from raytrain_hpc.parallel.tensor_parallel import RowParallelLinear
from raytrain_hpc.torch_private import foreach_norm
from raytrain_hpc.torch_private_fsdp import list_fsdp_shards

_FLOAT8, _WIDE = torch.float8_e4m3fn, torch.bfloat16
_ALIGNMENT = 16  # bytes of which messages are multiples, so that those of all ranks can be viewed as bf16


class Segment(NamedTuple):
    """The shard of one parameter in the flat message of an FSDP2 module."""

    length: int
    is_float8: bool


def apply_float8_all_gather(module: FSDPModule, num_ranks: int, traffic: QuantizedTraffic) -> None:
    """Let the weights of float8 products of an FSDP2 module travel in float8, in place. No other has to.

    `num_ranks`: over which its parameters are sharded.
    """
    shards = list_fsdp_shards(module)
    segments = [Segment(shape.numel(), _is_float8_weight(owner, name)) for owner, name, shape in shards]
    if any(segment.is_float8 for segment in segments):
        module.set_custom_all_gather(Float8AllGather(segments, num_ranks, traffic))  # type: ignore[arg-type]


def _is_float8_weight(owner: nn.Module, name: str) -> bool:
    """Return whether a parameter is used in float8 alone. A tied head uses the embedding table, which is not."""
    return name == "weight" and is_float8(owner) and isinstance(owner, nn.Linear | RowParallelLinear | Head)


class Float8AllGather(QuantizedComm):
    """A custom all-gather of weights for FSDP2."""

    def __init__(self, segments: Sequence[Segment], num_ranks: int, traffic: QuantizedTraffic):
        """`segments`: of the message of a rank, in order. `num_ranks`: of messages of this form."""
        super().__init__(traffic)
        self._segments, self._num_ranks = tuple(segments), num_ranks
        self._lengths = [segment.length for segment in segments]
        self._num_wide = sum(segment.length for segment in segments if not segment.is_float8)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [ranks * n] from `input_tensor` [n] of all ranks, both bf16. Blocking.

        Groups of another size get bf16: those of `parallel.reshard_over`, whose weights were rounded before.
        """
        if dist.get_world_size(group) != self._num_ranks:
            all_gather_flat(output_tensor, input_tensor, group)
            return
        shards = torch.split(input_tensor, self._lengths)
        wide = [shard for shard, segment in zip(shards, self._segments, strict=True) if not segment.is_float8]
        narrow = [shard for shard, segment in zip(shards, self._segments, strict=True) if segment.is_float8]
        amax = torch.stack(foreach_norm(narrow, inf))  # type: ignore[no-untyped-call]
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
        scales, factors = compute_scales(amax, _FLOAT8)
        data = [cast_scaled(shard, scale, _FLOAT8) for shard, scale in zip(narrow, scales.unbind(), strict=True)]
        message = torch.cat([x.view(torch.uint8) for x in (*wide, *data)])
        message = F.pad(message, (0, -message.numel() % _ALIGNMENT))
        gathered = message.new_empty(self._num_ranks * message.numel())
        all_gather_flat(gathered, message, group)
        self._traffic.bytes += (self._num_ranks - 1) * message.numel()
        self._unpack(gathered.view(self._num_ranks, -1), factors, output_tensor)

    def _unpack(self, gathered: Tensor, factors: Tensor, output: Tensor) -> None:
        """Write the messages [ranks, bytes] of all ranks, in bf16, to `output` [ranks * n]."""
        targets = torch.split(output.view(self._num_ranks, -1), self._lengths, dim=1)
        wide_start, narrow_start, remaining_factors = 0, 2 * self._num_wide, iter(factors.unbind())
        for (length, is_narrow), target in zip(self._segments, targets, strict=True):
            if is_narrow:
                data = gathered[:, narrow_start : narrow_start + length].view(_FLOAT8)
                target.copy_(data.to(_WIDE) * next(remaining_factors))
                narrow_start += length
            else:
                target.copy_(gathered[:, wide_start : wide_start + 2 * length].view(_WIDE))
                wide_start += 2 * length
