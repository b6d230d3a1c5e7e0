"""Callbacks of audits: those that compare the state before and after callbacks of the user, and the interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.config.field import AUTO
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.elastic.audit_cost import AuditCost, adapt_interval
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.step_audits import StepAudits
from raytrain_hpc.training.step_callbacks import AuditedState

_NOTED_FACTOR = 1.5  # by which an interval differs from the last one that the user was told, to be told


def build_audit_callbacks(
    audits: StepAudits | None,
    spec: WorkerSpec,
    replica_check: ReplicaCheck,
    snapshots: SnapshotManager,
    checkpointer: Checkpointer,
    emit: Callable[[Record], None],
) -> list[Callback]:
    """Return the callbacks of audits, if any step is audited. `emit`: discards records but on one rank."""
    if audits is None:
        return []
    on_verified = snapshots.mark_verified, checkpointer.mark_verified
    audited_state = AuditedState(audits.is_verified, replica_check, on_verified)
    callbacks = [audits.samples, StateHashes(audits), UpdatedState(audits), audited_state]
    return [*callbacks, MeasuredInterval(audits, emit)] if spec.config.fault.audit_interval == AUTO else callbacks


class UpdatedState(Callback):
    """Comparison of the state after the update of an audited step with what was verified."""

    priority = 99  # before callbacks of the user, which may change the state

    def __init__(self, audits: StepAudits):
        self._audits = audits

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Compare the state of this rank. Nothing is communicated: if a rank is lost now, others have the state."""
        self._audits.compare_updated_state()

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Raise StateChangedError on all ranks if the state of one differs after an audited step."""
        if self._audits.is_due(self.context.step - 1):
            self._audits.check_updated_state(self.context.step - 1)


class StateHashes(Callback):
    """Hashes of the state before a step that is audited: after the step before, or at the start of a generation."""

    priority = -200  # after all callbacks that change the state

    def __init__(self, audits: StepAudits):
        self._audits = audits

    def pre_train(self) -> None:
        """Hash the state if the first step is audited."""
        self._record_if_due()

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Hash the state if the next step is audited."""
        self._record_if_due()

    def _record_if_due(self) -> None:
        if self._audits.is_due(self.context.step):
            self._audits.memory.record_state()


class MeasuredInterval(Callback):
    """Interval of `fault.audit_interval=auto`, adapted to what audits have cost in this generation."""

    priority = -201  # last: the others ask whether the step was audited

    def __init__(self, audits: StepAudits, emit: Callable[[Record], None]):
        """`emit`: discards records but on one rank."""
        self._audits, self._emit, self._cost = audits, emit, AuditCost()
        self._noted = 0  # the last interval that the user was told

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Agree with all ranks on the interval, after the step that follows an audited one."""
        step = self.context.step - 1
        cost = self._cost.add_step(metrics["time/step_s"], is_audited=self._audits.is_due(step))
        if cost is None:
            return
        highest, schedule = self._reduce_max(cost), self._audits.schedule
        interval = adapt_interval(schedule.interval, highest, min(map(len, schedule.microbatches_by_rank)))
        schedule.set_interval(step - 1, interval)
        if not self._noted / _NOTED_FACTOR < interval < self._noted * _NOTED_FACTOR:
            self._noted = interval
            self._emit({"type": "note", "text": f"audits  every {interval} steps: one costs {highest:.2g} steps"})

    def _reduce_max(self, cost: float) -> float:
        highest, context = torch.tensor(cost, dtype=torch.float64), self._audits.context
        if context.world_group is not None:
            highest = highest.to(context.device)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=context.world_group)
            self._audits.passes.raise_if_aborted()
        return float(highest)
