"""Writers of metrics while their disk is slow."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from raytrain_hpc.observability.metric_writers import JsonlWriter


def test_a_slow_sync_does_not_delay_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_syncing, can_end, synced = threading.Event(), threading.Event(), []

    def fsync(descriptor: int) -> None:
        is_syncing.set()
        assert can_end.wait(30)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    writer = JsonlWriter(tmp_path / "metrics.jsonl", lambda text: None)
    writer.write({"step": 1})
    thread = threading.Thread(target=writer.sync)
    thread.start()
    assert is_syncing.wait(30)
    writer.write({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n' and not synced
    can_end.set()
    thread.join()
    writer.close()
    assert synced == [24, 24]


def test_a_sync_that_fails_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is opened again, since the file system may have been unmounted."""
    writer = JsonlWriter(tmp_path / "metrics.jsonl", lambda text: None)
    writer.write({"step": 1})

    def fail(descriptor: int) -> None:
        raise OSError("stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="stale"):
            writer.sync()
    writer.write({"step": 2})
    writer.sync()
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
