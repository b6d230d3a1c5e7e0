"""Load balancing of experts by a routing bias that is updated once per step, without an auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.model.moe import Router
from raytrain_hpc.training.step_audits import StepAudits


class ExpertBias(Callback):
    """Updater of the routing biases: overloaded experts become less likely by a fixed amount.

    Wang et al. 2024, arXiv 2408.15664. Counts are those of the whole batch, so the bias does not depend on the layout.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        rate: float,
        group: dist.ProcessGroup | None,
        audits: StepAudits | None = None,
    ):
        """Find the routers. `group`: the ranks that share the batch of a step; None: this rank alone."""
        self._routers = [
            submodule for module in modules for submodule in module.modules() if isinstance(submodule, Router)
        ]
        self._rate, self._group, self._audits = rate, group, audits

    def pre_step(self) -> None:
        """Reset the counts, which are those of a discarded step if the last one was not applied."""
        for router in self._routers:
            router.load.zero_()

    def pre_optim_step(self) -> None:
        """Update every bias by the counts of a step that is applied, verified if the step is audited."""
        loads, audits, step = self._stack_loads(), self._audits, self.context.step
        if audits is None or not audits.is_due(step):
            self.update(self._reduce(loads))
        else:
            peers = [self.context.rank] if self._group is None else dist.get_process_group_ranks(self._group)
            self.update(audits.reduce_loads(step, partial(self._reduce, loads), partial(self._is_right, loads), peers))

    @torch.no_grad()
    def update(self, loads: Tensor) -> None:
        """Update every bias by the positions per expert of the whole batch, [routers, experts]. Reset the counts."""
        for router, load in zip(self._routers, loads, strict=True):
            # The sign of (mean - load), in integers: all positions against E times those of each expert.
            direction = (load.sum() - load * len(load)).sign()
            router.bias.add_(direction.to(router.bias.dtype), alpha=self._rate)
            router.load.zero_()

    def _stack_loads(self) -> Tensor:
        """Return the counts of this rank, int64 [routers, experts]; a stage of a pipeline can have no routers."""
        loads = [router.load for router in self._routers]
        return torch.stack(loads) if loads else torch.empty(0, 0, dtype=torch.int64)

    def _reduce(self, loads: Tensor) -> Tensor:
        """Return the sum of the counts of all ranks that share the batch. Collective over them."""
        total = loads.clone()
        if self._group is not None and self._routers:
            dist.all_reduce(total, group=self._group)
        return total

    def _is_right(self, loads: Tensor, total: Tensor) -> bool:
        """Return whether a total is the sum of the counts, which the ranks exchange. Collective over them."""
        if self._group is None or not self._routers:
            return True
        gathered = [torch.empty_like(loads) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, loads, group=self._group)
        return torch.equal(torch.stack(gathered).sum(0), total)
