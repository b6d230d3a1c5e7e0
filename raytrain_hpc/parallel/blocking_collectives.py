"""Blocking waits for other ranks, and collectives whose name depends on the version of torch.

Keep blocking waits in this file: the watchdog recognizes a waiting rank by this path in its stack.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from raytrain_hpc.torch_private_fsdp import get_fsdp_collectives_file


def get_blocking_files() -> tuple[str, ...]:
    """Return the source files in which a training loop on a CPU waits for other ranks.

    They are torch's collectives, FSDP2's collectives and this file. Pass them to `Heartbeat`, which counts a stack
    frame in one of them as waiting instead of work.
    """
    return distributed_c10d.__file__, get_fsdp_collectives_file(), __file__


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait for transfers to complete."""
    for work in works:
        work.wait()


def all_gather_flat(
    gathered: Tensor, local: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Fill `gathered` [ranks * n] with `local` [n] of every rank, in rank order."""
    # torch 2.12 renamed all_gather_into_tensor to all_gather_single; 2.13 warns about the old name.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = all_gather(gathered, local, group=group, async_op=async_op)
    return work
