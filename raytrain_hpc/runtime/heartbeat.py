"""Signs of life of a worker in shared memory: whoever watches needs neither its interpreter nor its answer.

One small file in memory a worker, without a name, gone with its process, and opened through /proc. Written by the
worker alone, each field in one store of eight bytes: a thread beats, the loop marks what it has come to. Behind the
fields comes what its threads are at, when asked. Moments are of CLOCK_MONOTONIC, which all processes of a node share.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

from raytrain_hpc.elastic.watchdog import Phase, Signs

BEAT_S = 0.05
_QUIET_S = 0.01  # after which stacks that have begun to come are all there
_MISSED = 4  # beats, after which all threads are asked how long they waited: there are dozens
PHASES: tuple[Phase, ...] = ("idle", "building", "loading", "training", "evaluating", "saving")
_BEAT, _MARK, _PHASE, _THREAD, _STEP, _DURATION, _LOOKS, _WAITING, _URGENT = range(9)
_BYTES = 8 * 9
_NAME = "raytrain-heartbeat"


class Heartbeat:
    """A worker's side. SIGUSR1 has it write what its threads are at, even while one of them holds the interpreter."""

    def __init__(self, blocking_files: tuple[str, ...] = ()) -> None:
        """`blocking_files`: the source files in which the loop waits for other ranks instead of working."""
        self._blocking_files = blocking_files
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, _BYTES)
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        self._fields = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")
        os.lseek(descriptor, _BYTES, os.SEEK_SET)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True)
        self._committed_ns, self._loop = 0, 0
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def mark(self, phase: Phase) -> None:
        """The loop, which is the calling thread, has come to something new."""
        self._fields[_PHASE], self._fields[_THREAD] = PHASES.index(phase), threading.get_native_id()
        self._loop = threading.get_ident()
        self._fields[_MARK] = time.monotonic_ns()

    def committed(self, step: int) -> None:
        """A step is committed: the time since the one before is how long it took."""
        now = time.monotonic_ns()
        if self._committed_ns and self._fields[_STEP] == step - 1:
            self._fields[_DURATION] = now - self._committed_ns
        self._committed_ns, self._fields[_STEP] = now, step

    def urge(self) -> None:
        """There is one more record that the driver should fetch at once. One thread at a time."""
        self._fields[_URGENT] += 1

    def _beat(self) -> None:
        show_thread_name("heartbeat")
        while True:
            self._fields[_BEAT] = time.monotonic_ns()
            if PHASES[self._fields[_PHASE]] == "training":
                self._look()
            time.sleep(BEAT_S)

    def _look(self) -> None:
        """Count whether the loop is waiting for other ranks: one look says little, many say for which share of time."""
        frame = sys._current_frames().get(self._loop)
        if frame is not None:
            self._fields[_LOOKS] += 1
            self._fields[_WAITING] += frame.f_code.co_filename in self._blocking_files


class Pulse:
    """A watcher's side: the file of one worker."""

    def __init__(self, pid: int, path: Path):
        """Raises OSError where there is no such worker any more."""
        if _NAME not in os.readlink(path):
            raise FileNotFoundError(f"process {pid} is another one than it was: {path} is no heartbeat")
        self.pid = pid
        self._stacks = path.open()
        self._fields = memoryview(mmap.mmap(self._stacks.fileno(), _BYTES, prot=mmap.PROT_READ)).cast("q")
        self._stacks.seek(_BYTES)
        # How long the loop had waited for a CPU, of all its life, when it beat and when it marked last.
        self._at_beat, self._at_mark, self._waited = (0, 0.0), (0, 0.0), 0.0
        # The other threads, as seen since beats began to be missed, and how long all of them waited since then.
        self._others: dict[int, _Waiting] = {}
        self._beside = 0.0

    def read(self, rank: int) -> Signs:
        """What can be seen of it now."""
        fields = self._fields.tolist()
        state, waited = _state(self.pid), _waited_s(self.pid, fields[_THREAD], self._waited)
        self._waited = waited
        if fields[_BEAT] != self._at_beat[0]:
            self._at_beat = fields[_BEAT], waited
        if fields[_MARK] != self._at_mark[0]:
            self._at_mark = fields[_MARK], waited
        now = time.monotonic_ns()
        silent_s = (now - fields[_BEAT]) / 1e9 - (waited - self._at_beat[1])
        return Signs(
            rank=rank,
            alive=state not in "ZX",
            frozen=state in "Tt",
            beat_age_s=silent_s - self._waited_beside(fields[_THREAD], silent_s),
            mark_age_s=(now - fields[_MARK]) / 1e9 - (waited - self._at_mark[1]),
            phase=PHASES[fields[_PHASE]],
            step=fields[_STEP],
            step_s=fields[_DURATION] / 1e9 or None,
            looks=fields[_LOOKS],
            waiting=fields[_WAITING],
            urgent=fields[_URGENT],
        )

    def _waited_beside(self, loop: int, silent_s: float) -> float:
        """Seconds that threads beside the loop have waited for a CPU since beats began to be missed.

        Whichever of them has the interpreter, and the one that beats, keep the process silent while they wait; a thread
        that waits for the interpreter waits for no CPU, so that one which holds it for ever is found out all the same.
        """
        if silent_s < _MISSED * BEAT_S:
            self._others, self._beside = {}, 0.0
            return 0.0
        waited = 0.0
        for thread in _threads(self.pid):
            if thread != loop and (times := _times_s(self.pid, thread)) is not None:
                seen = self._others.setdefault(thread, _Waiting(*times))
                waited += seen.until_now(*times, state=_state(self.pid, thread))
        # Never less than before: of a process that is being killed threads go one by one.
        self._beside = max(self._beside, waited)
        return self._beside

    def ask_for_stacks(self) -> None:
        """Have it write what its threads are at."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def stacks(self, until: float) -> str:
        """What it has written of that until then (time.monotonic): its Python, and nothing of a frozen process."""
        text, grew = self._stacks.read(), time.monotonic()
        while time.monotonic() < until and not (text and time.monotonic() - grew > _QUIET_S):
            time.sleep(0.002)
            if more := self._stacks.read():
                text, grew = text + more, time.monotonic()
        return text


class _Waiting:
    """How long a thread has waited for a CPU since it was seen first. The kernel counts a wait when it is over."""

    def __init__(self, cpu_s: float, waited_s: float):
        self._first, self._cpu, self._waits_since = waited_s, cpu_s, time.monotonic()

    def until_now(self, cpu_s: float, waited_s: float, *, state: str) -> float:
        """With what goes on: ready to run, and not having run, since it was last seen otherwise."""
        if state != "R" or cpu_s != self._cpu:
            self._cpu, self._waits_since = cpu_s, time.monotonic()
        return waited_s - self._first + time.monotonic() - self._waits_since


def show_thread_name(name: str) -> None:
    """Let the operating system know the calling thread by this name, of at most 15 characters."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _state(pid: int, thread: int | None = None) -> str:
    """The kernel's letter for the state of a process, or of one of its threads; X where there is none."""
    place = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        return Path(place).read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _threads(pid: int) -> list[int]:
    """Threads of a process; none where it has gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _waited_s(pid: int, thread: int, otherwise: float) -> float:
    """Seconds that a thread was ready to run and had no CPU.

    `otherwise`: what was read last, which stands where the kernel does not say: of a process that has been killed,
    threads go before it does, and the time that it waited in its life would count as silence.
    """
    times = _times_s(pid, thread)
    return otherwise if times is None else times[1]


def _times_s(pid: int, thread: int) -> tuple[float, float] | None:
    """Seconds that a thread ran, and that it was ready to run and had no CPU; None where the kernel does not say."""
    try:
        ran, waited = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[:2]
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return None
