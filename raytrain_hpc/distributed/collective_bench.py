"""How long collectives take on this rank's groups, size by size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

_MIN_SECONDS, _MAX_REPEATS = 0.05, 40  # seconds that a size is measured for at least, and repetitions at most


def measure_collectives(sizes: Sequence[int], device: torch.device) -> dict[str, dict[int, float]]:
    """Operation -> bytes -> median seconds over all ranks of the world group. Collective.

    `sizes`: of the whole tensor that an operation is about, as nccl-tests count; rounded up to whole ranks.
    """
    ranks, found = dist.get_world_size(), {}
    for operation in _list_operations():
        found[operation] = {
            size: _measure_operation(operation, -(-size // (4 * ranks)) * ranks, device) for size in sizes
        }
    return found


def _list_operations() -> list[str]:
    return ["all_reduce", "reduce", "broadcast", "all_gather", "scatter", "reduce_scatter", "all_to_all", "send"]


def _measure_operation(operation: str, numel: int, device: torch.device) -> float:
    """Of one of so many fp32 elements: the slowest rank's time in each round, the median over rounds."""
    once = _make_operation(operation, numel, device)
    _time_once(once, device)  # connections are made by the first
    first = _reduce_max(_time_once(once, device), device)
    rounds = int(min(_MAX_REPEATS, max(3, _MIN_SECONDS / max(first, 1e-6))))
    return median(_reduce_max(_time_once(once, device), device) for _ in range(rounds))


def _time_once(run: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _reduce_max(seconds: float, device: torch.device) -> float:
    worst = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _make_operation(operation: str, numel: int, device: torch.device) -> Callable[[], object]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, part = torch.ones(numel, device=device), torch.ones(numel // ranks, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if operation == "reduce":
        return lambda: dist.reduce(whole, dst=0)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, src=0)
    if operation == "all_gather":
        gather = _get_collective("all_gather_single", "all_gather_into_tensor")
        return lambda: gather(whole, part)
    if operation == "scatter":
        return lambda: dist.scatter(part, list(whole.chunk(ranks)) if rank == 0 else None, src=0)
    if operation == "reduce_scatter":
        reduce_scatter = _get_collective("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: reduce_scatter(part, whole)
    if operation == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole)
    if rank == 0:  # from the first to the last
        return lambda: dist.send(whole, dst=ranks - 1)
    return (lambda: dist.recv(whole, src=0)) if rank == ranks - 1 else lambda: None


def _get_collective(name: str, old_name: str) -> Callable[..., object]:
    """A function of torch.distributed by its name since torch 2.13, or the one it had before."""
    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, old_name)
    return found
