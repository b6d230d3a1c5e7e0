"""Writers of metrics.jsonl and TensorBoard files. A write error is reported as a warning and never ends a run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WarningCallback = Callable[[str], None]
_TAIL_BYTES = 1 << 16  # more than the longest line


class JsonlWriter:
    """Writer of one JSON line per step, with full-precision floats. Each line is written completely or not at all."""

    def __init__(self, path: Path, on_warning: WarningCallback):
        self._file = _AppendOnlyFile(path, on_warning, terminator=b"\n")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of a step."""
        self._file.append(json.dumps(metrics).encode() + b"\n")

    def sync(self) -> None:
        """Write and fsync all steps so far. Raises OSError if that fails."""
        self._file.sync()

    def close(self) -> None:
        """Sync and close."""
        self._file.close()


class TensorBoardWriter:
    """Writer of TensorBoard scalars under the metric keys, with one event file per start of the run.

    A resumed run purges the steps that it repeats. SummaryWriter is not used, as its thread dies at the first failed
    write.
    """

    def __init__(self, directory: Path, first_step: int, on_warning: WarningCallback):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary, self._record_writer = Event, SessionLog, Summary, RecordWriter
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{first_step}"
        self._file = _AppendOnlyFile(directory / name, on_warning)
        self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        self.discard_steps_after(first_step)

    def discard_steps_after(self, step: int) -> None:
        """Make readers discard the steps after `step`, which will be repeated."""
        start = self._session(status=self._session.START)
        self._append(self._event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of a step."""
        values = [
            self._summary.Value(tag=key, simple_value=value)
            for key, value in metrics.items()
            if "/" in key and value is not None
        ]
        summary = self._summary(value=values)
        self._append(self._event(wall_time=metrics["time/unix"], step=metrics["step"], summary=summary))

    def close(self) -> None:
        """Sync and close."""
        self._file.close()

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


class _AppendOnlyFile:
    """File of records, each appended completely or not at all.

    Records that cannot be written are kept in memory and written in order once writing works again, even if the file
    system was unmounted in between. `on_warning` is called once per outage. When the file is opened, an incomplete
    record after the last `terminator`, left by a kill, is truncated. Thread-safe; a slow `sync`
    does not delay `append`.
    """

    def __init__(self, path: Path, on_warning: WarningCallback, *, terminator: bytes = b""):
        self._path, self._on_warning, self._terminator = path, on_warning, terminator
        self._descriptor: int | None = None
        self._end_offset: int | None = None  # end of the last complete record, once known
        self._pending: list[bytes] = []
        self._is_failing = False
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        with self._lock:
            self._pending.append(record)
            try:
                self._flush()
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    self._on_warning(f"{self._path} cannot be written: {error.strerror}; kept in memory until it can")
                self._is_failing = True

    def sync(self) -> None:
        with self._lock:
            self._flush()
            if self._descriptor is None:
                return
            descriptor = os.dup(self._descriptor)  # `append` can close the other one meanwhile
        try:
            os.fsync(descriptor)
        except OSError:
            with self._lock:
                self._close_descriptor()
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        try:
            self.sync()
        except OSError as error:
            self._on_warning(f"{self._path} lacks its last {len(self._pending)} records: {error.strerror}")
        with self._lock:
            self._close_descriptor()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._descriptor is None:
            self._descriptor, self._end_offset = self._open()
        end = self._end_offset or 0
        block = b"".join(self._pending)
        num_written = 0
        try:
            while num_written < len(block):
                num_written += os.pwrite(self._descriptor, block[num_written:], end + num_written)
        except OSError:
            with contextlib.suppress(OSError):  # the next attempt overwrites the rest
                os.truncate(self._descriptor, end)
            self._close_descriptor()
            raise
        self._end_offset = end + len(block)
        self._pending.clear()

    def _close_descriptor(self) -> None:
        """Close the descriptor. Another file system may be mounted at the path when the file is opened again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> tuple[int, int]:
        """Open the file, truncated to its last complete record; return the descriptor and that length.

        The file is created only at the first call: if it is missing later, its file system is not mounted.
        """
        if self._end_offset is None:
            self._path.parent.mkdir(exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | (os.O_CREAT if self._end_offset is None else 0), 0o666)
        try:
            end = (
                self._find_record_end(descriptor)
                if self._end_offset is None
                else min(self._end_offset, os.fstat(descriptor).st_size)
            )
            os.truncate(descriptor, end)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor, end

    def _find_record_end(self, descriptor: int) -> int:
        """Return the end of the last complete record that an earlier process wrote."""
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        tail = os.pread(descriptor, _TAIL_BYTES, start)
        return start + (tail.rfind(self._terminator) + len(self._terminator) if self._terminator else len(tail))
