"""Signals by which a user or a scheduler stops a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_NOTICE = "saving and stopping after the current step; once more stops at once, without saving"


@contextmanager
def stop_on_signals(stop: threading.Event, notice: str = "") -> Iterator[None]:
    """Set `stop` at the first Ctrl-C or SIGTERM, and raise KeyboardInterrupt at the second.

    `notice`: written to stderr at the first one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if notice:  # written without Python's buffers, which the signal may have interrupted
            os.write(2, f"{signal.Signals(number).name}: {notice}\n".encode())

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
