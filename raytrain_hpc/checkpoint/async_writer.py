"""Asynchronous checkpoint writing: a rank copies its state to host memory, and a thread writes the file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.shard_io import write_shard
from raytrain_hpc.checkpoint.shard_upload import ShardUploader
from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.sharded_state import StateShard
from raytrain_hpc.storage.location import Location

Tier = Literal["run", "local"]  # the run directory, or node-local storage


class AsyncCheckpointWriter:
    """Writer of one rank's checkpoint shards in a background thread, one checkpoint at a time.

    `on_report` is called once per file, from the writing thread, with {"step": N, "tier": of the file, "shard": a
    ShardReport as JSON} or {"step": N, "tier": ..., "error": text}, and "seconds" since the copy began. An OSError is
    reported only, and the writer stays usable. Any other exception is reported and also raised by the next `save` or
    `finish`. `host`: name of this node, for reports of local files.
    """

    def __init__(self, on_report: Callable[[dict[str, Any]], None], host: str = "") -> None:
        self._on_report, self._host = on_report, host
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._buffer = HostBuffer()
        self._uploader = ShardUploader()
        self._copy_start = 0.0
        self._local_file: tuple[Path, ShardReport] | None = None  # of the last save, if it was written

    def save(
        self,
        shards: Sequence[StateShard],
        path: Location | None,
        step: int,
        *,
        wait: bool,
        local_path: Path | None = None,
        pre_write: Callable[[], None] = lambda: None,
    ) -> float:
        """Start writing `shards` to `path`. Return the seconds for which the caller was blocked.

        The content is that of the tensors at the time of the call. They must not change before `wait_for_staging` has
        returned. A write in progress is waited for first; with `wait`, this one is too. With `local_path`, the file is
        written there and, unless `path` is None, uploaded from there: the next save waits only for the upload before.
        `pre_write`: called in the writing thread first, to make room.
        """
        start = time.monotonic()
        self._finish_write()
        self._copy_start = time.monotonic()
        copies = self._buffer.copy(shards).shards
        # A daemon thread, so that a file server that does not respond cannot block the exit of the interpreter. A file
        # cut short by the exit has not been reported and is therefore never published.
        self._thread = threading.Thread(
            target=self._write,
            args=(copies, path, local_path, step, pre_write),
            name="checkpoint-writer",
            daemon=True,
        )
        self._thread.start()
        if wait:
            self.finish()
        return time.monotonic() - start

    def upload_last(self, path: Location, step: int) -> None:
        """Upload the local file of the last save, that of `step`, to `path`. Waits until it is written."""
        self._finish_write()
        self._copy_start = time.monotonic()
        self._upload(path, step)

    def wait_for_staging(self) -> None:
        """Wait until the tensors being saved are copied to host memory. Call before the state changes.

        Copies from a GPU overlap with its computation.
        """
        self._buffer.synchronize()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for the write and the upload in progress, each at most `timeout` seconds. Return whether they are done.

        Raises the exception, other than OSError, of an earlier write.
        """
        return self._finish_write(timeout) and self._uploader.finish(timeout) and self._finish_write(timeout)

    def _finish_write(self, timeout: float | None = None) -> bool:
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _write(
        self,
        copies: Sequence[StateShard],
        path: Location | None,
        local_path: Path | None,
        step: int,
        pre_write: Callable[[], None],
    ) -> None:
        """Write one file and report it; upload it if it is local. Runs in the writing thread."""
        self._local_file = None
        try:
            pre_write()
        except Exception as error:
            self._error = error
        if local_path is not None:
            report = self._write_file(copies, local_path, step, "local")
            self._local_file = None if report is None else (local_path, report)
        if path is None:
            return
        if self._local_file is None:
            self._write_file(copies, path, step, "run")
        else:
            self._upload(path, step)

    def _write_file(self, copies: Sequence[StateShard], path: Location, step: int, tier: Tier) -> ShardReport | None:
        """Write and report one file. Return its report, or None if it cannot be written."""
        shard_report = None
        try:
            self._buffer.synchronize()
            shard_report = write_shard(path, copies)
            if tier == "local":
                shard_report = replace(shard_report, host=self._host)
            report: dict[str, Any] = {"shard": shard_report.to_json()}
        except OSError as error:
            report = {"error": f"{path} cannot be written: {error.strerror or error}"}
        except Exception as error:
            self._error = error
            report = {"error": f"{path} cannot be written: {error!r}"}
        self._emit(report | {"step": step, "tier": tier}, self._copy_start)
        return shard_report

    def _upload(self, path: Location, step: int) -> None:
        """Start to upload the local file of the last save, after the previous upload."""
        header, start = {"step": step, "tier": "run"}, self._copy_start
        if self._local_file is None:
            self._emit(header | {"error": f"{path} cannot be written: there is no local file of this step"}, start)
            return
        local_path, shard_report = self._local_file
        content = {"shard": replace(shard_report, host="").to_json()}

        def report(problem: str) -> None:
            self._emit(header | ({"error": problem} if problem else content), start)

        try:
            file = local_path.open("rb")
        except OSError as error:
            report(f"{local_path} cannot be read: {error.strerror}")
            return
        self._uploader.start(file, shard_report, path, report)

    def _emit(self, report: dict[str, Any], start: float) -> None:
        try:
            self._on_report(report | {"seconds": time.monotonic() - start})
        except Exception as error:
            self._error = error
