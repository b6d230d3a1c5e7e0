"""Reads are repeated while storage cannot be reached, and only then."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from raytrain_hpc.storage import read_retry
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry, is_transient


class Clock:
    """Time that passes in `sleep` only."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(read_retry, "time", clock)
    return clock


def failing(clock: Clock, until: float, error: OSError) -> Callable[[], float]:
    """Return a read that fails until a time."""

    def read() -> float:
        if clock.now < until:
            raise error
        return clock.now

    return read


def test_reads_are_repeated_until_storage_is_back_and_an_outage_is_logged_once(clock: Clock) -> None:
    lines: list[str] = []
    retry, error = ReadRetry(60.0, lines.append), OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    began = clock.now
    assert began + 20 <= retry(failing(clock, began + 20, error), "/data/a") < began + 26
    assert len(lines) == 2 and "/data/a cannot be read on node" in lines[0] and "for up to 60 s" in lines[0]
    assert "Stale file handle" in lines[0] and "/data/a is read again" in lines[1]
    with pytest.raises(OSError, match="Stale"):
        retry(failing(clock, clock.now + 1000, error), "/data/b")
    assert len(lines) == 3


def test_repetition_is_bounded_and_off_by_default(clock: Clock) -> None:
    began, error = clock.now, OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        ReadRetry(60.0)(failing(clock, began + 1000, error), "a")
    assert 40 < clock.now - began <= 60
    began = clock.now
    with pytest.raises(OSError, match="Input/output"):
        NO_RETRY(failing(clock, began + 1, error), "a")
    assert clock.now == began


AWS = "When reading information for key 'a' in bucket 'b': AWS Error "


@pytest.mark.parametrize(
    "text",
    [
        f"{AWS}NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Could not connect to server",
        f"{AWS}UNKNOWN (HTTP status 503) during HeadObject operation: No response body.",
        f"{AWS}UNKNOWN (HTTP status 429) during HeadObject operation: No response body.",
        "AWS Error INTERNAL_FAILURE during GetObject operation: Failed to flush response stream (eof: 0, bad: 1)",
        "google::cloud::Status(UNAVAILABLE: Permanent error, with a last message of PerformWork() - CURL error)",
    ],
)
def test_errors_of_stores_that_can_pass(text: str) -> None:
    assert is_transient(OSError(text))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(f"{AWS}ACCESS_DENIED during HeadObject operation: No response body."),
        OSError(f"{AWS}UNKNOWN (HTTP status 400) during HeadObject operation: No response body."),
        OSError("Verification of flatbuffer-encoded Footer failed."),
        OSError("Expected to be able to read 128 bytes for message body, got 7"),
    ],
    ids=str,
)
def test_missing_or_damaged_files_and_refused_credentials_fail_at_once(clock: Clock, error: OSError) -> None:
    began = clock.now
    with pytest.raises(OSError, match=".") as raised:
        ReadRetry(60.0)(failing(clock, began + 1, error), "a")
    assert raised.value is error and clock.now == began
