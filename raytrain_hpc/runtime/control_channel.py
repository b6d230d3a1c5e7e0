"""The two ways between a worker's loop and the world: records out, requests in. Safe to use from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raytrain_hpc.elastic.fault_attribution import Call
from raytrain_hpc.elastic.watchdog import Phase
from raytrain_hpc.runtime.heartbeat import Heartbeat

if TYPE_CHECKING:
    from raytrain_hpc.distributed.abort import Abort

Record = dict[str, Any]

_REMEMBERED = 4096  # steps; the driver fetches those of rank 0 every second
_URGENT = ("shard",)  # types of records: until it has them all, a checkpoint is none


@dataclass(frozen=True)
class Ended:
    """How a rank's part in a generation ended. `steps`: those whose state it holds in memory; `copies`: the same of
    other ranks, by their rank.

    done, stopped: saved, as it was to be. paused: at a step boundary, to go on in another generation. broken: something
    raised, its `reason`. lost: a part of the state that was to be gone on from is held by nobody. differs: replicas are
    not equal; those `differing` from most are known by rank, if any.
    """

    outcome: Literal["done", "stopped", "paused", "broken", "lost", "differs"]
    reason: str = ""
    steps: tuple[int, ...] = ()
    copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    taken_in: int = 0  # the generation in which these states were taken, whose ranks they go by
    differing: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()  # the collectives that it was last in, where it broke


class Control:
    """Requests to the loop, and the records it has made and nobody has fetched yet."""

    def __init__(self, stop: threading.Event | None = None, heartbeat: Heartbeat | None = None) -> None:
        """`heartbeat`: where the loop's signs of life go, if anybody watches."""
        self._heartbeat = heartbeat
        self._stop = stop or threading.Event()
        self._pause = threading.Event()
        self._abort: Abort | None = None
        self._records: list[Record] = []
        self._committed: deque[Record] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def request_stop(self) -> None:
        """Ask for a checkpoint and an end after the current step."""
        self._stop.set()

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop.is_set()

    def request_pause(self) -> None:
        """Ask for an end after the current step, to go on as another generation."""
        self._pause.set()

    @property
    def pause_requested(self) -> bool:
        """Whether a pause was asked for."""
        return self._pause.is_set()

    def begin(self) -> None:
        """A generation begins: what was asked of the one before has come, and is asked again if it is still wished."""
        self._pause.clear()
        self._stop.clear()
        self.mark("building")

    def arm(self, abort: Abort) -> None:
        """From now on, until `disarm`, this is what ends the collectives of this rank."""
        self._abort = abort

    def disarm(self) -> None:
        """There are none any more."""
        if self._abort is not None:
            self._abort.end()

    def abort(self) -> None:
        """The generation has fallen: have the loop go on, with an error, from where it waits for others."""
        if self._abort is not None:
            self._abort()

    @property
    def aborted(self) -> bool:
        """Whether that has come to pass: what a collective gives after it is nothing."""
        return self._abort is not None and self._abort.called

    def mark(self, phase: Phase) -> None:
        """The loop has come to something new."""
        if self._heartbeat is not None:
            self._heartbeat.mark(phase)

    def committed(self, metrics: Record) -> None:
        """Remember the metrics of a step: every rank has them, should the one that reports be lost."""
        with self._lock:
            while self._committed and self._committed[-1]["step"] >= metrics["step"]:
                self._committed.pop()  # a step that is run again
            self._committed.append(dict(metrics))
        if self._heartbeat is not None:
            self._heartbeat.committed(metrics["step"])

    def amend(self, metrics: Record) -> None:
        """Replace the remembered metrics of the last committed step, after its checkpoint and evaluation."""
        with self._lock:
            if self._committed and self._committed[-1]["step"] == metrics["step"]:
                self._committed[-1] = dict(metrics)

    def recall(self, after: int) -> list[Record]:
        """The metrics of the steps after this one, as far as they are remembered."""
        with self._lock:
            return [metrics for metrics in self._committed if metrics["step"] > after]

    def emit(self, record: Record) -> None:
        """Add a record for the driver."""
        with self._lock:
            self._records.append(record)
            if record["type"] in _URGENT and self._heartbeat is not None:
                self._heartbeat.urge()  # after the record is there: who sees this finds it

    def note(self, text: str) -> None:
        """Add a line for the console."""
        self.emit({"type": "note", "text": text})

    def drain(self) -> list[Record]:
        """Take all records made since the last call, in order."""
        with self._lock:
            taken, self._records = self._records, []
        return taken
