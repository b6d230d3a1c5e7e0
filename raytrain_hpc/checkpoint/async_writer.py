"""A rank's side of a checkpoint: copy the state aside, go on training, write behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.shard_io import write_shard
from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.sharded_state import StateShard


class AsyncCheckpointWriter:
    """Writes what one rank holds, one checkpoint at a time.

    `report` is called once for every save, from the writing thread, with {"step": N, "shard": a ShardReport as JSON} or
    {"step": N, "error": text}. A disk that refuses is such an error: an alarm, and the writer goes on. Anything else
    that goes wrong is reported too, and raised from the next `save` or `finish`.
    """

    def __init__(self, on_report: Callable[[dict[str, Any]], None]) -> None:
        self._on_report = on_report
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._buffer = HostBuffer()

    def save(self, shards: Sequence[StateShard], path: Path, step: int, *, wait: bool) -> float:
        """Write these slices to `path`. Returns the seconds the caller was held up.

        What is written is what the tensors hold now; they may change once `copied` has returned. A write that is still
        going on is waited for first; with `wait` this one is too.
        """
        start = time.monotonic()
        self.finish()
        copies = self._buffer.copy(shards).shards
        # A daemon: an interpreter that wants to exit must not hang on a file server that does not answer. A file that
        # is cut short by that was not reported, and so is never published.
        self._thread = threading.Thread(
            target=self._write, args=(copies, path, step), name="checkpoint-writer", daemon=True
        )
        self._thread.start()
        if wait:
            self.finish()
        return time.monotonic() - start

    def wait_for_staging(self) -> None:
        """Wait until the tensors that are saved have been copied: those on a GPU are behind the next step."""
        self._buffer.synchronize()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for the write that is going on, at most `timeout` seconds. Returns whether none is going on any more."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        unexpected, self._error = self._error, None
        if unexpected is not None:
            raise unexpected
        return True

    def _write(self, copies: Sequence[StateShard], path: Path, step: int) -> None:
        try:
            self._buffer.synchronize()
            outcome: dict[str, Any] = {"step": step, "shard": write_shard(path, copies).to_json()}
        except OSError as error:
            outcome = {"step": step, "error": f"{path} cannot be written: {error.strerror or error}"}
        except Exception as error:
            self._error = error
            outcome = {"step": step, "error": f"{path} cannot be written: {error!r}"}
        try:
            self._on_report(outcome)
        except Exception as error:
            self._error = error
