"""Timing of collectives on the process group of all ranks, per operation and message size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from raytrain_hpc.torch_device import synchronize

_MIN_SECONDS, _MAX_REPEATS = 0.05, 40  # per size: target measuring time, and limit of repetitions


def measure_collectives(sizes: Sequence[int], device: torch.device) -> dict[str, dict[int, float]]:
    """Measure all collectives. Return operation -> bytes -> seconds. Collective.

    Seconds are the median over repetitions of the slowest rank's time. `sizes`: bytes of the whole tensor of an
    operation, as in nccl-tests, rounded up to a multiple of the number of ranks.
    """
    world_size, results = dist.get_world_size(), {}
    for operation in _list_operations():
        results[operation] = {
            size: _measure_operation(operation, -(-size // (4 * world_size)) * world_size, device) for size in sizes
        }
    return results


def _list_operations() -> list[str]:
    return ["all_reduce", "reduce", "broadcast", "all_gather", "scatter", "reduce_scatter", "all_to_all", "send"]


def _measure_operation(operation: str, numel: int, device: torch.device) -> float:
    """Return the seconds of one operation on `numel` fp32 elements: median over repetitions of the slowest rank."""
    run = _make_operation(operation, numel, device)
    _time_once(run, device)  # the first call opens connections
    estimate = _reduce_max(_time_once(run, device), device)
    repeats = int(min(_MAX_REPEATS, max(3, _MIN_SECONDS / max(estimate, 1e-6))))
    return median(_reduce_max(_time_once(run, device), device) for _ in range(repeats))


def _time_once(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call on this rank, after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def _reduce_max(seconds: float, device: torch.device) -> float:
    """Return the maximum over all ranks. Collective."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _make_operation(operation: str, numel: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one collective on preallocated tensors."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full, shard = torch.ones(numel, device=device), torch.ones(numel // world_size, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(full)
    if operation == "reduce":
        return lambda: dist.reduce(full, dst=0)
    if operation == "broadcast":
        return lambda: dist.broadcast(full, src=0)
    if operation == "all_gather":
        all_gather = _get_collective("all_gather_single", "all_gather_into_tensor")
        return lambda: all_gather(full, shard)
    if operation == "scatter":
        return lambda: dist.scatter(shard, list(full.chunk(world_size)) if rank == 0 else None, src=0)
    if operation == "reduce_scatter":
        reduce_scatter = _get_collective("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: reduce_scatter(shard, full)
    if operation == "all_to_all":
        output = torch.empty_like(full)
        return lambda: dist.all_to_all_single(output, full)
    if rank == 0:  # from the first rank to the last
        return lambda: dist.send(full, dst=world_size - 1)
    return (lambda: dist.recv(full, src=0)) if rank == world_size - 1 else lambda: None


def _get_collective(name: str, old_name: str) -> Callable[..., object]:
    """Return a function of torch.distributed by its name since torch 2.13, or by its earlier name."""
    function: Callable[..., object] = getattr(dist, name, None) or getattr(dist, old_name)
    return function
