"""An audit by spares in progress: its samples, the calls of its spares, and what they have returned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_hpc.driver.worker_group import Worker
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit
from raytrain_hpc.elastic.spare_audit_verdict import UnitTraces
from raytrain_hpc.runtime.audit_sample import AuditSample
from raytrain_hpc.runtime.control_channel import Record

_STUCK_S = 30.0  # after one spare of an audit has failed, until the others are replaced

Samples = Sequence[tuple[AuditSample, Any]]  # of all ranks of an audit, with references to their weights


@dataclass
class RunningAudit:
    """An audit in progress. `calls`: of the spares; `computed`: what earlier calls have returned.

    `accused`: the spares that have computed twice alike what the ranks have not.
    """

    samples: Samples
    members: Sequence[Worker]
    spares: Sequence[Worker]
    calls: list[Any]
    began: float
    computed: list[UnitTraces] = field(default_factory=list)
    accused: Sequence[Worker] = ()
    failed: list[Any] = field(default_factory=list)  # calls whose failure is known
    failed_at: float | None = None  # when one of the calls was found to have failed while others had not ended
    called_at: float = 0.0  # monotonic seconds

    def get_calls(self) -> list[tuple[Worker, Any]]:
        """Return the spares with their calls, in order."""
        return list(zip(self.spares, self.calls, strict=True))

    def is_stuck(self) -> bool:
        """Return whether spares wait for one that has failed. Call while some have not ended and one has failed."""
        self.failed_at = self.failed_at or time.time()
        return time.time() > self.failed_at + _STUCK_S

    def measure_s(self) -> float:
        """Return the seconds since the spares were called."""
        return time.monotonic() - self.called_at

    @property
    def audit(self) -> SpareAudit:
        """What is computed again."""
        return self.samples[0][0].audit

    @property
    def of_ranks(self) -> UnitTraces:
        """The traces of the audited ranks."""
        by_rank = {sample.rank: sample.traces for sample, _ in self.samples}
        return [by_rank[rank] for rank in self.audit.ranks]


def is_complete(samples: Samples) -> bool:
    """Return whether samples of one step are of all ranks of its audit."""
    audit = samples[0][0].audit
    return {sample.rank for sample, _ in samples} == {*audit.ranks, *audit.sources}


def get_place(worker: Worker) -> Record:
    """Return the fields of an incident that say where a worker runs."""
    return {key: worker.info[key] for key in ("node", "node_id", "pid")}


def make_incident(running: RunningAudit, rank: int | None, kind: str, reason: str) -> Record:
    """Return the incident that an audit has found. `rank`: None if a spare was wrong."""
    return {
        "type": "incident",
        "kind": kind,
        "rank": rank,
        "operation": f"audit of step {running.audit.step + 1} by a spare",
        "reason": reason,
        "time": running.began,
        "recovered_s": time.time() - running.began,
        "steps_lost": 0,
    }
