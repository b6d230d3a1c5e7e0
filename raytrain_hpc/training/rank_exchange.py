"""Exchange of values between ranks for audits: each rank sends some to one rank, and receives those of another."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGNMENT = 16  # bytes; every tensor begins at a multiple, so that it can be viewed in its dtype


def exchange_objects(value: Any, destination: int, source: int, device: torch.device) -> Any:
    """Send a value to a rank, and return the one that another rank sends to this one. Collective over all ranks.

    Every rank must be the destination of one other. Tensors arrive on the device that they were on.
    """
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size, num_ranks = torch.tensor([payload.numel()], device=device), dist.get_world_size()
    sizes = [torch.empty_like(size) for _ in range(num_ranks)]
    dist.all_gather(sizes, size)
    received = _exchange_bytes(payload, int(sizes[source]), destination, source)
    return pickle.loads(bytes(received.cpu().numpy()))


def exchange_tensors(
    tensors: Mapping[Any, Tensor], more: Any, destination: int, source: int, device: torch.device
) -> tuple[dict[Any, Tensor], Any]:
    """Send tensors and another value to a rank, and return those of another rank. As `exchange_objects` otherwise.

    All tensors arrive on `device`, contiguous.
    """
    specs = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    received_specs, received_more = exchange_objects((specs, more), destination, source, device)
    parts = [_to_bytes(tensor.detach().to(device)) for tensor in tensors.values()]
    payload = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *parts])
    sizes = [_align(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in received_specs.values()]
    received = _exchange_bytes(payload, sum(sizes), destination, source)
    starts = accumulate(sizes, initial=0)
    views = {}
    for (key, (shape, dtype)), start in zip(received_specs.items(), starts, strict=False):
        size = torch.Size(shape).numel() * dtype.itemsize
        views[key] = received[start : start + size].view(dtype).view(shape)
    return views, received_more


def _exchange_bytes(payload: Tensor, recv_bytes: int, destination: int, source: int) -> Tensor:
    ranks = range(dist.get_world_size())
    send_sizes = [payload.numel() if rank == destination else 0 for rank in ranks]
    recv_sizes = [recv_bytes if rank == source else 0 for rank in ranks]
    received = payload.new_empty(recv_bytes)
    dist.all_to_all_single(received, payload, recv_sizes, send_sizes)
    return received


def _to_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    padding = _align(flat.numel()) - flat.numel()
    return torch.nn.functional.pad(flat, (0, padding)) if padding else flat


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
