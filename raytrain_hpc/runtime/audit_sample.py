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
    """A sample of this rank, and the weights that belong to it, until they are cleared. Thread-safe."""

    def __init__(self) -> None:
        self._sample: AuditSample | None = None
        self._weights: NDArray[Any] | None = None
        self._next_step = 0
        self._lock = threading.Lock()

    def clear(self, next_step: int = 0) -> None:
        """Drop the sample. The next one is to be of the step after `next_step` committed ones, or of a later one."""
        with self._lock:
            self._sample = self._weights = None
            self._next_step = next_step

    def is_wanted(self, step: int) -> bool:
        """Return whether to sample the step after `step` committed ones: there is no sample, and it is not too early.

        The memory of the weights of the last one can then be overwritten. All ranks get the same answer if `clear` has
        told them in time from which step on.
        """
        if not self._lock.acquire(blocking=False):  # the last one is being read
            return False
        is_wanted = self._sample is None and step >= self._next_step
        self._lock.release()
        return is_wanted

    def put(self, sample: AuditSample, weights: NDArray[Any] | None) -> None:
        """Store a sample. `weights`: a block of bytes laid out as its index says; None: it has no index."""
        with self._lock:
            self._sample, self._weights = sample, weights

    def take(self) -> tuple[AuditSample | None, NDArray[Any] | None]:
        """Return the sample and a copy of its weights; None twice if there is none."""
        with self._lock:
            return self._sample, None if self._weights is None else self._weights.copy()
