"""Samples of a rank for audits by spares. They cost a copy of the weights, and hashes of one microbatch."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.distributed.replica_check import CorruptionError
from raytrain_hpc.elastic.spare_audit_schedule import SpareAuditSchedule
from raytrain_hpc.parallel.computation_trace import Trace
from raytrain_hpc.runtime.audit_sample import AuditSample, SampleStore
from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.training.data_builder import Loader
from raytrain_hpc.training.pass_audits import ReadMicrobatch
from raytrain_hpc.training.traced_passes import TracedPasses

_WEIGHTS_PREFIX = "model."  # of the names of weights and buffers in the state


class StateDistrustedError(CorruptionError):
    """A spare and a rank disagree about a microbatch of an earlier step than `step`, so the state may be wrong."""

    def __init__(self, step: int):
        super().__init__((), f"step {step + 1} is not applied: a spare and a rank disagree about an earlier step")


@dataclass
class _Unfinished:
    """A sample of the step in progress."""

    sample: AuditSample
    traces: list[Trace] = field(default_factory=list)


class SpareSamples(Callback):
    """Recorder of this rank's samples in `store`. A sample is complete after its step."""

    def __init__(
        self,
        schedule: SpareAuditSchedule,
        context: ParallelContext,
        passes: TracedPasses,
        state: ShardedState,
        loader: Loader,
        store: SampleStore,
        *,
        generation: int,
        has_buffers: bool,
    ):
        """`state`: the live state of this rank. `has_buffers`: forward passes can change a part of it."""
        self._schedule, self._context, self._passes, self._loader = schedule, context, passes, loader
        self._weights = ShardedState(shard for shard in state if shard.name.startswith(_WEIGHTS_PREFIX))
        self._store, self._buffer = store, HostBuffer()
        self._generation, self._has_buffers = generation, has_buffers
        self._unfinished: _Unfinished | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a sample of the step after `step` committed ones is taken."""
        return self._schedule.is_due(step)

    def run_passes(self, step: int, train: Callable[[], Tensor], read: ReadMicrobatch) -> Tensor:
        """Run the passes of a step by `train`, take a sample of them, and return the result of `train`.

        `read`: reads a logical microbatch of the step again. Not collective: only some ranks have anything to do.
        """
        audit, rank = self._schedule.plan(step), self._context.rank
        is_source, is_audited = rank in audit.sources, rank in audit.ranks
        if not (is_source or is_audited) or not self._store.is_wanted(step):
            return train()
        sample = AuditSample(audit, self._generation, rank)
        if is_source:
            sample = replace(sample, index=self._buffer.copy(self._weights).to_index().to_json())
            if self._has_buffers:
                self._buffer.synchronize()
        unfinished = _Unfinished(sample)
        if is_audited:
            in_layout = self._schedule.schedule
            get_slot = partial(in_layout.get_slot, in_layout.plan(step), self._context.layout)
            losses, unfinished.traces = self._passes.train(get_slot, train)
            if not self._loader.reads_any_microbatch:
                microbatch = in_layout.plan(step).microbatches[self._context.layout.get_dp_rank(rank)]
                unfinished.sample = replace(sample, batch=_serialize(read(step, microbatch)))
        else:
            losses = train()
        self._buffer.synchronize()  # before the weights are updated
        self._unfinished = unfinished
        return losses

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Complete the sample of the step, if one is taken."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None:
            return
        traces = tuple(tuple(trace.to_entries()) for trace in unfinished.traces)
        weights = None if unfinished.sample.index is None else self._buffer.block.numpy()
        self._store.put(replace(unfinished.sample, traces=traces), weights)


def _serialize(batch: Any) -> bytes:
    content = io.BytesIO()
    torch.save(batch, content)
    return content.getvalue()
