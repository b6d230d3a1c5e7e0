"""Monitor of the deadline: requests a stop in time, from measured steps and checkpoints (elastic/deadline.py)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial

from raytrain_hpc.background_thread import run_in_background
from raytrain_hpc.elastic.deadline import Deadline, StopCosts, should_stop
from raytrain_hpc.observability.console import format_duration

_POLL_INTERVAL_S = 1.0
_NUM_STEPS, _NUM_SAVES = 16, 4  # recent ones, of which the slowest counts


class DeadlineMonitor:
    """Watcher of the clock, in a thread since steps, evaluations and recoveries can take long. None: no deadline.

    `assumed_save_s`: seconds of a checkpoint until one has been measured.
    """

    def __init__(
        self,
        deadline: Deadline | None,
        assumed_save_s: float,
        stop_event: threading.Event,
        print_line: Callable[[str], None],
    ):
        self._deadline, self._stop_event, self._print_line = deadline, stop_event, print_line
        self._step_s: deque[float] = deque([0.0], maxlen=_NUM_STEPS)
        self._assumed_save_s = assumed_save_s
        self._save_s: deque[float] = deque(maxlen=_NUM_SAVES)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Print the deadline, and request a stop within the context if it comes near."""
        if self._deadline is None:
            yield
            return
        self._print_line(f"ends by {_describe(self._deadline)}: saves and stops before, exit code 3")
        with run_in_background("deadline", partial(self._run, self._deadline)):
            yield

    def record_step(self, seconds: float) -> None:
        """Record the time of a committed step."""
        self._step_s.append(seconds)

    def record_save(self, seconds: float) -> None:
        """Record the time of a checkpoint, from the copy of the state to its publication."""
        self._save_s.append(seconds)

    def _run(self, deadline: Deadline, closed: threading.Event) -> None:
        while not (closed.wait(_POLL_INTERVAL_S) or self._stop_event.is_set()):
            costs = StopCosts(max(self._step_s), max(self._save_s, default=self._assumed_save_s))
            if should_stop(time.time(), deadline, costs):
                measured = "" if self._save_s else " (no checkpoint measured yet)"
                self._print_line(f"deadline {_describe(deadline)}: saving and stopping; {costs.describe()}{measured}")
                self._stop_event.set()


def _describe(deadline: Deadline) -> str:
    at = datetime.fromtimestamp(deadline.unix).strftime("%Y-%m-%d %H:%M:%S")
    return f"{at} in {format_duration(max(0.0, deadline.unix - time.time()))} ({deadline.origin})"
