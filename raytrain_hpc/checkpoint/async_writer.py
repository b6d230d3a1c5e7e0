"""Asynchronous checkpoint writing: a rank copies its state to host memory, and a thread writes the file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from raytrain_hpc.checkpoint.shard_io import write_shard
from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.sharded_state import StateShard
from raytrain_hpc.storage.location import Location


class AsyncCheckpointWriter:
    """Writer of one rank's checkpoint shards in a background thread, one checkpoint at a time.

    `on_report` is called once per save, from the writing thread, with {"step": N, "shard": a ShardReport as JSON} or
    {"step": N, "error": text}, and "seconds" since the copy began. An OSError is reported only, and the writer stays
    usable. Any other exception is reported and also raised by the next `save` or `finish`.
    """

    def __init__(self, on_report: Callable[[dict[str, Any]], None]) -> None:
        self._on_report = on_report
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._buffer = HostBuffer()

    def save(self, shards: Sequence[StateShard], path: Location, step: int, *, wait: bool) -> float:
        """Start writing `shards` to `path`. Return the seconds for which the caller was blocked.

        The content is that of the tensors at the time of the call. They must not change before `wait_for_staging` has
        returned. A write in progress is waited for first; with `wait`, this one is too.
        """
        start = time.monotonic()
        self.finish()
        copy_start = time.monotonic()
        copies = self._buffer.copy(shards).shards
        # A daemon thread, so that a file server that does not respond cannot block the exit of the interpreter. A file
        # cut short by the exit has not been reported and is therefore never published.
        self._thread = threading.Thread(
            target=self._write, args=(copies, path, step, copy_start), name="checkpoint-writer", daemon=True
        )
        self._thread.start()
        if wait:
            self.finish()
        return time.monotonic() - start

    def wait_for_staging(self) -> None:
        """Wait until the tensors being saved are copied to host memory. Call before the state changes.

        Copies from a GPU overlap with its computation.
        """
        self._buffer.synchronize()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the write in progress. Return whether it has finished.

        Raises the exception, other than OSError, of an earlier write.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _write(self, copies: Sequence[StateShard], path: Location, step: int, copy_start: float) -> None:
        """Write one file and report it. Runs in the writing thread."""
        try:
            self._buffer.synchronize()
            report: dict[str, Any] = {"step": step, "shard": write_shard(path, copies).to_json()}
        except OSError as error:
            report = {"step": step, "error": f"{path} cannot be written: {error.strerror or error}"}
        except Exception as error:
            self._error = error
            report = {"step": step, "error": f"{path} cannot be written: {error!r}"}
        try:
            self._on_report(report | {"seconds": time.monotonic() - copy_start})
        except Exception as error:
            self._error = error
