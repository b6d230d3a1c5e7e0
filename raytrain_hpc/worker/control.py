"""The two ways between a worker's loop and the world: records out, requests in. Safe to use from any thread."""

from __future__ import annotations

import threading
from typing import Any

Record = dict[str, Any]


class Control:
    """Requests to the loop, and the records it has made and nobody has fetched yet."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self._records: list[Record] = []
        self._lock = threading.Lock()

    def request_stop(self) -> None:
        """Ask for a checkpoint and an end after the current step."""
        self._stop.set()

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop.is_set()

    def emit(self, record: Record) -> None:
        """Add a record for the driver."""
        with self._lock:
            self._records.append(record)

    def note(self, text: str) -> None:
        """Add a line for the console."""
        self.emit({"type": "note", "text": text})

    def drain(self) -> list[Record]:
        """Take all records made since the last call, in order."""
        with self._lock:
            taken, self._records = self._records, []
        return taken
