"""Load balancing of experts by a routing bias that is updated once per step, without an auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.model.moe import Router


class ExpertBias(Callback):
    """Updater of the routing biases: overloaded experts become less likely by a fixed amount.

    Wang et al. 2024, arXiv 2408.15664. Counts are those of the whole batch, so the bias does not depend on the layout.
    """

    def __init__(self, modules: Iterable[nn.Module], rate: float, group: dist.ProcessGroup | None):
        """Find the routers. `group`: the ranks that share the batch of a step; None: this rank alone."""
        self._routers = [
            submodule for module in modules for submodule in module.modules() if isinstance(submodule, Router)
        ]
        self._rate, self._group = rate, group

    def pre_step(self) -> None:
        """Reset the counts, which are those of a discarded step if the last one was not applied."""
        for router in self._routers:
            router.load.zero_()

    def pre_optim_step(self) -> None:
        """Update every bias by the counts of a step that is applied."""
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Update every bias by the counts of this step, then reset the counts. Collective if there is a group."""
        if not self._routers:
            return
        loads = torch.stack([router.load for router in self._routers])
        if self._group is not None:
            dist.all_reduce(loads, group=self._group)
        for router, load in zip(self._routers, loads, strict=True):
            # The sign of (mean - load), in integers: all positions against E times those of each expert.
            direction = (load.sum() - load * len(load)).sign()
            router.bias.add_(direction.to(router.bias.dtype), alpha=self._rate)
            router.load.zero_()
