"""The two ways between a worker's loop and the world: records out, requests in. Safe to use from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raytrain_hpc.elastic.fault_attribution import CollectiveCall
from raytrain_hpc.elastic.watchdog import Phase
from raytrain_hpc.runtime.heartbeat import Heartbeat

if TYPE_CHECKING:
    from raytrain_hpc.distributed.abort import CollectiveAbort

Record = dict[str, Any]

_MAX_COMMITTED = 4096  # steps; the driver fetches those of rank 0 every second
_URGENT_TYPES = ("shard",)  # types of records: until it has them all, a checkpoint is none


@dataclass(frozen=True)
class GenerationOutcome:
    """How a rank's part in a generation ended. `steps`: those whose state it holds in memory; `copies`: the same of
    other ranks, by their rank.

    done, stopped: saved, as it was to be. paused: at a step boundary, to go on in another generation. broken: something
    raised, its `reason`. lost: a part of the state that was to be gone on from is held by nobody. differs: replicas are
    not equal; those `differing` from most are known by rank, if any.
    """

    outcome: Literal["done", "stopped", "paused", "broken", "lost", "differs"]
    reason: str = ""
    steps: tuple[int, ...] = ()
    replica_steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    snapshot_generation: int = 0  # the generation in which these states were taken, whose ranks they go by
    divergent_ranks: tuple[int, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()  # the collectives that it was last in, where it broke


class ControlChannel:
    """Requests to the loop, and the records it has made and nobody has fetched yet."""

    def __init__(self, stop_event: threading.Event | None = None, heartbeat: Heartbeat | None = None) -> None:
        """`heartbeat`: where the loop's signs of life go, if anybody watches."""
        self._heartbeat = heartbeat
        self._stop_event = stop_event or threading.Event()
        self._pause_event = threading.Event()
        self._abort: CollectiveAbort | None = None
        self._records: list[Record] = []
        self._committed_metrics: deque[Record] = deque(maxlen=_MAX_COMMITTED)
        self._lock = threading.Lock()

    def request_stop(self) -> None:
        """Ask for a checkpoint and an end after the current step."""
        self._stop_event.set()

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop_event.is_set()

    def request_pause(self) -> None:
        """Ask for an end after the current step, to go on as another generation."""
        self._pause_event.set()

    @property
    def pause_requested(self) -> bool:
        """Whether a pause was asked for."""
        return self._pause_event.is_set()

    def begin_generation(self) -> None:
        """A generation begins: what was asked of the one before has come, and is asked again if it is still wished."""
        self._pause_event.clear()
        self._stop_event.clear()
        self.set_phase("building")

    def arm_abort(self, abort: CollectiveAbort) -> None:
        """From now on, until `disarm`, this is what ends the collectives of this rank."""
        self._abort = abort

    def disarm_abort(self) -> None:
        """There are none any more."""
        if self._abort is not None:
            self._abort.disarm()

    def abort(self) -> None:
        """The generation has fallen: have the loop go on, with an error, from where it waits for others."""
        if self._abort is not None:
            self._abort()

    @property
    def is_aborted(self) -> bool:
        """Whether that has come to pass: what a collective gives after it is nothing."""
        return self._abort is not None and self._abort.is_aborted

    def set_phase(self, phase: Phase) -> None:
        """The loop has come to something new."""
        if self._heartbeat is not None:
            self._heartbeat.set_phase(phase)

    def record_commit(self, metrics: Record) -> None:
        """Remember the metrics of a step: every rank has them, should the one that reports be lost."""
        with self._lock:
            while self._committed_metrics and self._committed_metrics[-1]["step"] >= metrics["step"]:
                self._committed_metrics.pop()  # a step that is run again
            self._committed_metrics.append(dict(metrics))
        if self._heartbeat is not None:
            self._heartbeat.record_commit(metrics["step"])

    def amend_metrics(self, metrics: Record) -> None:
        """Replace the remembered metrics of the last committed step, after its checkpoint and evaluation."""
        with self._lock:
            if self._committed_metrics and self._committed_metrics[-1]["step"] == metrics["step"]:
                self._committed_metrics[-1] = dict(metrics)

    def recall_metrics(self, after_step: int) -> list[Record]:
        """The metrics of the steps after this one, as far as they are remembered."""
        with self._lock:
            return [metrics for metrics in self._committed_metrics if metrics["step"] > after_step]

    def emit(self, record: Record) -> None:
        """Add a record for the driver."""
        with self._lock:
            self._records.append(record)
            if record["type"] in _URGENT_TYPES and self._heartbeat is not None:
                self._heartbeat.notify_urgent()  # after the record is there: who sees this finds it

    def log(self, text: str) -> None:
        """Add a line for the console."""
        self.emit({"type": "note", "text": text})

    def drain(self) -> list[Record]:
        """Take all records made since the last call, in order."""
        with self._lock:
            taken, self._records = self._records, []
        return taken
