"""Passes whose microbatches are traced: those of a step, and those that only recompute a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.model_replicas import ModelReplicas
from raytrain_hpc.elastic.shard_holders import ParameterKind
from raytrain_hpc.model.moe import Router
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.train_module import AnyBatch


class TracedPasses:
    """Executor of passes in which one microbatch of each rank is traced, and what its experts compute for it."""

    def __init__(
        self,
        context: ParallelContext,
        model: ParallelModel,
        model_step: ForwardBackward,
        drop_gradients: Callable[[], None],
    ):
        """`drop_gradients`: sets all gradients to None."""
        self._context, self._model_step, self.drop_gradients = context, model_step, drop_gradients
        self._expert_peers = ModelReplicas(context.layout).get_expert_peers(context.rank)
        self._own_source = self._expert_peers.index(context.rank)
        modules = [named for module in model.modules.values() for named in module.named_modules()]
        self._loads = {f"load of {name}": module.load for name, module in modules if isinstance(module, Router)}

    def train(
        self,
        get_slot: Callable[[int], int],
        train: Callable[[], Tensor],
        sums: Mapping[ParameterKind, ShardTraces] | None = None,
    ) -> tuple[Tensor, list[Trace]]:
        """Run the passes of a step by `train`. Return the losses of this rank's microbatches, and the traces.

        `get_slot`: returns the number of the traced microbatch of a rank among its microbatches. `sums`: as of
        `ComputationTracer.trace`.
        """
        slots = [get_slot(peer) for peer in self._expert_peers]
        with self._context.tracer.trace(slots, self._own_source, sums=sums, counters=self._loads) as traces:
            losses = train()
            traces[0].add("contributed", "loss", losses[slots[self._own_source]])
        return losses, traces

    def recompute(self, step: int, batch: AnyBatch) -> list[Trace]:
        """Run the passes of a microbatch, drop their gradients, and return the traces. Collective over all ranks."""
        slots = [0] * len(self._expert_peers)
        with self._context.tracer.trace(slots, self._own_source, drop=True, counters=self._loads) as traces:
            sums = self._model_step.recompute(step, batch)
            traces[0].add("contributed", "loss", sums)
        self.drop_gradients()
        for load in self._loads.values():
            load.zero_()
        return traces
