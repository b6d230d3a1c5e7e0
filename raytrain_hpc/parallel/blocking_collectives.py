"""Where a rank waits for others, and collectives whose name depends on torch's version.

Waiting has a file of its own, by which a look from outside tells it from working.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


def wait(works: Iterable[dist.Work]) -> None:
    """Wait for transfers that are under way."""
    for work in works:
        work.wait()


def gather_flat(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `gathered` [ranks * n] with every rank's `mine` [n], in rank order."""
    # all_gather_into_tensor until torch 2.12, which has the new name and warns of the old one from 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, mine, group=group)
