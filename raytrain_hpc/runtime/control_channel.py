"""Channel between a worker's training loop and the driver: records out, requests in. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raytrain_hpc.distributed.peer_links import count_timeouts, drop_incoming_packets
from raytrain_hpc.elastic.fault_attribution import CollectiveCall
from raytrain_hpc.elastic.watchdog import Phase
from raytrain_hpc.runtime.audit_sample import SampleStore
from raytrain_hpc.runtime.heartbeat import Heartbeat
from raytrain_hpc.runtime.published_memory import PublishedMemory
from raytrain_hpc.snapshot.journal import SharedJournal
from raytrain_hpc.snapshot.shared_file import SnapshotHandles

if TYPE_CHECKING:
    from raytrain_hpc.distributed.abort import CollectiveAbort

Record = dict[str, Any]
RequestKind = Literal["stop", "pause", "distrust"]

_MAX_COMMITTED = 4096  # steps; the driver fetches those of rank 0 every second
_URGENT_TYPES = ("shard",)  # record types that complete a checkpoint


@dataclass(frozen=True)
class GenerationOutcome:
    """How a generation ended on a rank, and which states the rank holds in memory.

    Outcomes. done, stopped: ended as requested, after a save. paused: ended at a step boundary, to continue in another
    generation. broken: an error was raised, see `reason`. lost: no rank holds some part of the state to restore.
    damaged: the checkpoint to resume from is, see `reason`. differs: replicas are not equal, or a microbatch that was
    computed twice; `divergent_ranks` disagree with the majority, if there is one; `divergence`: their kind of failure;
    `suspects`: ranks that disagree with each other.

    `steps`: steps of which this rank's state is in memory; `replica_steps`: the same for replicas of other ranks;
    `verified_step`: the one of them whose state was verified.
    """

    outcome: Literal["done", "stopped", "paused", "broken", "lost", "damaged", "differs"]
    reason: str = ""
    steps: tuple[int, ...] = ()
    replica_steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    verified_step: int | None = None
    snapshot_generation: int = 0  # the generation that took these snapshots; replicas are keyed by its ranks
    divergent_ranks: tuple[int, ...] = ()
    divergence: str = ""
    suspects: tuple[int, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()  # its last collectives, if it is broken
    traceback: str = ""  # of the exception, if it is broken and no peer is the cause
    is_program_error: bool = False  # see `worker.error_report`


class ControlChannel:
    """Requests to the training loop, and its records that the driver has not fetched yet."""

    def __init__(self, stop_event: threading.Event | None = None, heartbeat: Heartbeat | None = None) -> None:
        """Create a channel. `heartbeat`: receives phases and committed steps, if the worker is monitored."""
        self._heartbeat = heartbeat
        self._requests = {
            "stop": stop_event or threading.Event(),
            "pause": threading.Event(),
            "distrust": threading.Event(),
        }
        self._phase: Phase = "idle"
        self._generation = 0
        self._early_requests: list[tuple[int, RequestKind]] = []  # with their generations, which have not begun yet
        self.samples = SampleStore()
        self._abort: CollectiveAbort | None = None
        self._records: list[Record] = []
        self._committed_metrics: deque[Record] = deque(maxlen=_MAX_COMMITTED)
        self._journal: SharedJournal | None = None  # of the same metrics, in memory that outlives this process
        self._lock, self._abort_lock = threading.Lock(), threading.Lock()

    def request(self, kind: RequestKind, generation: int | None = None) -> None:
        """Request that a generation ends after the current step; None: the current generation.

        stop: with a checkpoint, and the run ends; pause: to continue in another generation; distrust: without its
        state, since a spare disagrees with a rank. A request can overtake the call that begins its generation, or come
        after its end: it is kept, or dropped.
        """
        with self._lock:
            if generation is None or generation == self._generation:
                self._requests[kind].set()
            elif generation > self._generation:
                self._early_requests.append((generation, kind))

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requests["stop"].is_set()

    @property
    def pause_requested(self) -> bool:
        """Whether a pause was requested."""
        return self._requests["pause"].is_set()

    @property
    def distrust_requested(self) -> bool:
        """Whether the state of this generation is not to be trusted."""
        return self._requests["distrust"].is_set()

    def begin_generation(self, generation: int) -> None:
        """Begin a generation with the requests that are for it. The driver repeats earlier ones that still apply."""
        with self._lock:
            self._generation = generation
            for event in self._requests.values():
                event.clear()
            for requested, kind in self._early_requests:
                if requested == generation:
                    self._requests[kind].set()
            self._early_requests = [early for early in self._early_requests if early[0] > generation]
        self._abort = None
        self.samples.clear()
        self.set_phase("building")

    def arm_abort(self, abort: CollectiveAbort) -> None:
        """Let `abort` end the collectives of this generation, until `disarm_abort`. It may replace one that ends fewer.

        Aborts at once if that one has been called.
        """
        with self._abort_lock:
            previous, self._abort = self._abort, abort
            if previous is not None and previous.is_aborted:
                abort()

    def disarm_abort(self) -> None:
        """Disable `abort`. Call when the generation no longer has collectives."""
        if self._abort is not None:
            self._abort.disarm()

    def abort(self) -> None:
        """Abort collectives: a loop that waits in one continues with an error. Call when the generation is aborted."""
        with self._abort_lock:
            if self._abort is not None:
                self._abort()

    def count_link_timeouts(self) -> dict[int, int]:
        """Return for each peer how often in a row it has acknowledged nothing in time: see `count_timeouts`."""
        return {} if self._abort is None else count_timeouts(self._abort.sockets)

    def drop_incoming_packets(self) -> None:
        """Let this rank receive nothing from its peers any more, to inject a network that is down."""
        if self._abort is not None:
            drop_incoming_packets(self._abort.sockets)

    @property
    def is_aborted(self) -> bool:
        """Whether collectives were aborted. Their results are then invalid."""
        return self._abort is not None and self._abort.is_aborted

    def set_phase(self, phase: Phase) -> None:
        """Set the phase of the training loop. Call from the thread of the loop."""
        self._phase = phase
        if self._heartbeat is not None:
            self._heartbeat.set_phase(phase)

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Set the phase of the training loop within the context, and then the one before."""
        previous = self._phase
        self.set_phase(phase)
        try:
            yield
        finally:
            self.set_phase(previous)

    def record_commit(self, metrics: Record) -> None:
        """Remember the metrics of a step. Every rank does, in case the reporting rank is lost."""
        with self._lock:
            while self._committed_metrics and self._committed_metrics[-1]["step"] >= metrics["step"]:
                self._committed_metrics.pop()  # the step was run again
            self._committed_metrics.append(dict(metrics))
            self._append_to_journal(metrics)
        if self._heartbeat is not None:
            self._heartbeat.record_commit(metrics["step"])

    def amend_metrics(self, metrics: Record) -> None:
        """Replace the remembered metrics of the last committed step, after its checkpoint and evaluation."""
        with self._lock:
            if self._committed_metrics and self._committed_metrics[-1]["step"] == metrics["step"]:
                self._committed_metrics[-1] = dict(metrics)
                self._append_to_journal(metrics)

    def publish_memory(self, generation: int, snapshots: Mapping[int, SnapshotHandles], *, keeps_metrics: bool) -> None:
        """Let the agent of the node hold shared memory of this process, instead of that of earlier generations.

        `snapshots`: by rank. `keeps_metrics`: also keep the metrics of the steps from now on in such memory.
        """
        if self._heartbeat is not None:
            self._journal = SharedJournal() if keeps_metrics else None
            metrics = None if self._journal is None else self._journal.handle
            self._heartbeat.publish_memory(PublishedMemory(generation, snapshots, metrics))

    def _append_to_journal(self, metrics: Record) -> None:
        if self._journal is not None:
            self._journal.append(metrics)

    def recall_metrics(self, after_step: int) -> list[Record]:
        """Return the remembered metrics of the steps after `after_step`."""
        with self._lock:
            return [metrics for metrics in self._committed_metrics if metrics["step"] > after_step]

    def emit(self, record: Record) -> None:
        """Add a record for the driver."""
        with self._lock:
            self._records.append(record)
            if record["type"] in _URGENT_TYPES and self._heartbeat is not None:
                self._heartbeat.notify_urgent()  # after the append, so that the driver finds the record

    def log(self, text: str) -> None:
        """Add a line for the console."""
        self.emit({"type": "note", "text": text})

    def drain(self) -> list[Record]:
        """Return the records since the last call, in order, and clear them."""
        with self._lock:
            records, self._records = self._records, []
        return records
