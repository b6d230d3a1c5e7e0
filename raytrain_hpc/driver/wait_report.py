"""Lines about a wait for nodes or workers: what is missing, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raytrain_hpc.background_thread import run_in_background
from raytrain_hpc.observability.console import format_duration

_FIRST_DELAY_S = 3.0  # shorter waits are not reported
_GROWTH = 3.0  # of the delay between two lines
_MAX_DELAY_S = 300.0


@contextmanager
def report_wait(print_line: Callable[[str], None], describe: Callable[[], str], limit_s: float) -> Iterator[None]:
    """Print a line from time to time while the context lasts, at intervals that grow from 3 s to 5 minutes.

    `describe` returns what is missing; it is called in another thread. `limit_s`: cluster.start_timeout.
    """
    start = time.monotonic()

    def report(done: threading.Event) -> None:
        delay_s = _FIRST_DELAY_S
        while not done.wait(delay_s):
            waited = format_duration(time.monotonic() - start)
            print_line(
                f"waiting for {describe()}: {waited} of up to {format_duration(limit_s)} (cluster.start_timeout)"
            )
            delay_s = min(delay_s * _GROWTH, _MAX_DELAY_S)

    with run_in_background("wait", report):
        yield
