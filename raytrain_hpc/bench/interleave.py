"""Two trainings that are alive together and take turns on the machine, a few steps each.

A machine shared with others changes its speed by a tenth within a minute. Whole runs one after the other meet different
machines; turns of a few seconds meet the same one. Whoever is not on turn is stopped by SIGSTOP.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from raytrain_hpc.errors import RunFailed

START_TIMEOUT_S = 300.0
# A platform's driver gives up on a worker that is silent for 10 s, and the other one can have two turns in a row.
SHORTEST_TURN_S, LONGEST_TURN_S, STEPS_A_TURN = 2.0, 4.5, 4.5


@dataclass
class Contestant:
    """A training that runs until it is ended. `commits` reads when its steps were done, `workers` its ranks' pids."""

    name: str
    process: subprocess.Popen[str]
    output: Path
    commits: Callable[[], list[float]]
    workers: Callable[[], list[int]]
    windows: list[tuple[float, float]] = field(default_factory=list)

    def until_steps(self, count: int) -> None:
        """Wait until it has done this many steps. Raises RunFailed where it ended before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self.commits()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self._ended()
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank. Raises RunFailed where one is gone."""
        for pid in self.workers():
            try:
                os.kill(pid, number)
            except ProcessLookupError as error:
                raise self._ended() from error

    def _ended(self) -> RunFailed:
        lines = [line for line in self.output.read_text().splitlines() if line.strip()]
        return RunFailed(f"{self.name} ended too soon: {lines[-1] if lines else 'no output'}")

    def take_turn(self, seconds: float) -> None:
        """Run for a while, then stop again."""
        began = time.time()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        self.windows.append((began, time.time()))

    def step_seconds(self) -> list[float | None]:
        """Median time of a step in each turn, from steps that began and ended in it; None where there was none."""
        commits = self.commits()
        medians = []
        for began, ended in self.windows:
            inside = [at for at in commits if began < at < ended]
            medians.append(median(after - before for before, after in pairwise(inside)) if len(inside) > 1 else None)
        return medians

    def peak_mib(self) -> float:
        """Peak resident memory of the first rank's process so far."""
        status = Path(f"/proc/{self.workers()[0]}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10


@contextmanager
def contestant(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    output: Path,
    commits: Callable[[], list[float]],
    workers: Callable[[], list[int]],
) -> Iterator[Contestant]:
    """Start a training in a session of its own; ended at the latest when the context is left."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    one = Contestant(name, process, output, commits, workers)
    try:
        yield one
    finally:
        for pid in workers():
            try:
                os.kill(pid, signal.SIGKILL)  # a stopped process hears nothing else
            except ProcessLookupError:
                continue
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def alternate(first: Contestant, second: Contestant, pairs: int, warmup: int) -> list[tuple[float, float]]:
    """Let the two take turns. Returns (seconds a step of the first, of the second) for each pair of turns in a row."""
    for one in (first, second):
        one.until_steps(warmup)
    for one in (first, second):
        one.signal(signal.SIGSTOP)
    for one in (first, second):
        one.take_turn(LONGEST_TURN_S)  # until now both were alive, and on a crowded machine a step took any time
    alone = max(one.step_seconds()[0] or LONGEST_TURN_S for one in (first, second))
    seconds = min(LONGEST_TURN_S, max(SHORTEST_TURN_S, STEPS_A_TURN * alone))
    for number in range(pairs):
        for one in (first, second) if number % 2 == 0 else (second, first):
            one.take_turn(seconds)
    both = zip(first.step_seconds()[1:], second.step_seconds()[1:], strict=True)
    kept = [(mine, other) for mine, other in both if mine is not None and other is not None]
    if len(kept) < (pairs + 1) // 2:
        raise RunFailed(f"turns of {seconds:.0f} s are too short for a step of {alone:.1f} s")
    return kept


__all__ = ["Contestant", "alternate", "contestant"]
