"""Exchange of batches between ranks, for audits of data that only one rank can read."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist


def exchange_objects(value: Any, destination: int, source: int, device: torch.device) -> Any:
    """Send a value to a rank, and return the one that another rank sends to this one. Collective over all ranks.

    Every rank must be the destination of one other. Tensors arrive on the device that they were on.
    """
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size, num_ranks = torch.tensor([payload.numel()], device=device), dist.get_world_size()
    sizes = [torch.empty_like(size) for _ in range(num_ranks)]
    dist.all_gather(sizes, size)
    send_sizes = [payload.numel() if rank == destination else 0 for rank in range(num_ranks)]
    recv_sizes = [int(sizes[rank]) if rank == source else 0 for rank in range(num_ranks)]
    received = payload.new_empty(sum(recv_sizes))
    dist.all_to_all_single(received, payload, recv_sizes, send_sizes)
    return pickle.loads(bytes(received.cpu().numpy()))
