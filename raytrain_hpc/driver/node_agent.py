"""Watches the workers of one node through shared memory, has them say where they are, and kills by pid.

In the driver's process for its own node, in an actor of its own on every other one: neither needs a worker's answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.watchdog import Signs, Suspect, limits, suspects
from raytrain_hpc.runtime.heartbeat import Pulse, show_thread_name

_LOOK_S = 0.05
_LATE_S = 0.25  # between two looks: then nobody is accused for as long again
_SAY_S = 0.1
_STEPS = 32  # of which the median counts

Pulses = Mapping[int, tuple[int, str]]  # rank -> pid, path of its heartbeat


@dataclass(frozen=True)
class Seen:
    """What an agent saw last: who shows no life, and the signs of life of every rank of its node."""

    suspects: list[Suspect]
    signs: dict[int, Signs]


class Agent:
    """Looks at its workers every 0.05 s; whoever asks hears what it found last."""

    def __init__(self, config: Config, orphaned_s: float = inf):
        """`orphaned_s`: after so long without a question its workers are ended, as the others go on without them."""
        self._config, self._orphaned_s, self._asked = config, orphaned_s, time.monotonic()
        self._pulses: dict[int, Pulse] = {}  # by pid, opened once
        self._ranks: dict[int, Pulse] = {}
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._counted: dict[int, int] = {}
        self._found: list[Suspect] = []
        self._signs: dict[int, Signs] = {}
        self._over = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def watch(self, workers: Pulses) -> None:
        """From now on these are the ranks of this node."""
        with self._lock:
            for pid, path in workers.values():
                if pid not in self._pulses:
                    with contextlib.suppress(OSError):  # it has ended meanwhile, which is heard otherwise
                        self._pulses[pid] = Pulse(pid, Path(path))
            self._ranks = {rank: self._pulses[pid] for rank, (pid, _) in workers.items() if pid in self._pulses}
            self._found, self._signs = [], {}

    def look(self) -> Seen:
        """Who shows no life, and what was seen of all."""
        self._asked = time.monotonic()
        with self._lock:
            return Seen(self._found, self._signs)

    def stacks(self) -> dict[int, str]:
        """What the threads of every rank of this node are at."""
        with self._lock:
            for pulse in self._ranks.values():
                pulse.ask_for_stacks()
            until = time.monotonic() + _SAY_S
            return {rank: pulse.stacks(until) for rank, pulse in self._ranks.items()}

    def kill(self, rank: int) -> None:
        """End a rank, frozen or not."""
        with self._lock:
            pulse = self._ranks.pop(rank, None)
            self._found = [one for one in self._found if one.rank != rank]
        if pulse is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pulse.pid, signal.SIGKILL)

    def close(self) -> None:
        """Watch nobody any more."""
        self._over.set()

    def _run(self) -> None:
        show_thread_name("watch")
        looked, trusting = time.monotonic(), 0.0
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            if now - looked > _LATE_S:  # whatever held this thread up may have held up the workers, too
                trusting = now + (now - looked)
            looked = now
            if now - self._asked > self._orphaned_s:
                for rank in [rank for rank, one in self._signs.items() if one.phase != "idle"]:
                    self.kill(rank)
            with self._lock:
                signs = [pulse.read(rank) for rank, pulse in self._ranks.items()]
                for one in signs:
                    if one.step_s is not None and self._counted.get(one.rank) != one.step:
                        self._counted[one.rank] = one.step
                        self._steps.append(one.step_s)
                self._found = [] if now < trusting else suspects(signs, limits(self._config, self._steps))
                self._signs = {one.rank: one for one in signs}
