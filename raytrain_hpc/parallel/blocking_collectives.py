"""Blocking waits for other ranks, and collectives whose name depends on torch's version.

Keep blocking waits in this file: the watchdog recognizes a waiting rank by this path in its stack.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def get_blocking_files() -> tuple[str, ...]:
    """Return the source files in which a training loop on a CPU waits for other ranks: torch's collectives, FSDP's,
    and this file. Pass to `Heartbeat`, which counts a frame in one of them as waiting, not as work."""
    # FSDP's module is named by its path: importing it loads the compiler.
    fsdp_collectives = Path(dist.__file__).parent / "fsdp" / "_fully_shard" / "_fsdp_collectives.py"
    return distributed_c10d.__file__, str(fsdp_collectives), __file__


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait for transfers that are under way."""
    for work in works:
        work.wait()


def all_gather_flat(gathered: Tensor, local: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `gathered` [ranks * n] with every rank's `mine` [n], in rank order."""
    # all_gather_into_tensor until torch 2.12, which has the new name and warns of the old one from 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, local, group=group)
