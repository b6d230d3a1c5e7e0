"""Samples of a rank for audits by spares: hashes of a microbatch that it has computed, and its part of the weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain_hpc.elastic.audit_verdict import Entry
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit

if TYPE_CHECKING:
    from numpy.typing import NDArray

Traces = Sequence[Sequence[Entry]]  # of a rank: of its own microbatch, then of its experts by source


@dataclass(frozen=True)
class AuditSample:
    """What a rank contributes to an audit by spares.

    `traces`: of its microbatch, if it is one of `audit.ranks`. `batch`: that microbatch, serialized, if no other
    process can read it. `index`: of its weights as JSON, if it is one of `audit.sources`.
    """

    audit: SpareAudit
    generation: int
    rank: int
    traces: Traces = ()
    batch: bytes = b""
    index: dict[str, Any] | None = None


class SampleStore:
    """The last sample of this rank, and the weights that belong to it. Thread-safe."""

    def __init__(self) -> None:
        self._sample: AuditSample | None = None
        self._weights: NDArray[Any] | None = None
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Drop the last sample, since the memory of its weights will be overwritten. False: it is being read."""
        if not self._lock.acquire(blocking=False):
            return False
        self._sample = self._weights = None
        self._lock.release()
        return True

    def put(self, sample: AuditSample, weights: NDArray[Any] | None) -> None:
        """Store a sample. `weights`: a block of bytes laid out as its index says; None: it has no index."""
        with self._lock:
            self._sample, self._weights = sample, weights

    def take(self, after_step: int) -> tuple[AuditSample | None, NDArray[Any] | None]:
        """Return the sample and a copy of its weights if it is of a later step than `after_step`, else None twice."""
        with self._lock:
            sample, weights = self._sample, self._weights
            if sample is None or sample.audit.step <= after_step:
                return None, None
            return sample, None if weights is None else weights.copy()
