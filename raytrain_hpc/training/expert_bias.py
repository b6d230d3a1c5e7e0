"""The bias that keeps experts busy, moved once a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from raytrain_hpc.model.moe import Router


class ExpertBias:
    """Routers whose choice has a bias: experts that got more than their share become less likely by a fixed amount.

    Wang et al. 2024, arXiv 2408.15664. The counts are those of the whole batch, so no layout can change the bias.
    """

    def __init__(self, modules: Iterable[nn.Module], rate: float, group: dist.ProcessGroup | None):
        """`group`: the ranks that see a step's batch together, None where it is this one."""
        self._routers = [part for module in modules for part in module.modules() if isinstance(part, Router)]
        self._rate, self._group = rate, group

    def reset_counts(self) -> None:
        """Begin to count anew: the step is not taken."""
        for router in self._routers:
            router.load.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Move every bias by what this step's positions chose, and begin to count anew."""
        if not self._routers:
            return
        loads = torch.stack([router.load for router in self._routers])
        if self._group is not None:
            dist.all_reduce(loads, group=self._group)
        for router, load in zip(self._routers, loads, strict=True):
            # In integers: E times an expert's positions against those of all.
            behind = (load.sum() - load * len(load)).sign()
            router.bias.add_(behind.to(router.bias.dtype), alpha=self._rate)
            router.load.zero_()
