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

from raytrain_hpc.elastic.watchdog import Phase, WorkerHealth

BEAT_INTERVAL_S = 0.05
_STACKS_QUIET_S = 0.01  # after which stacks that have begun to come are all there
_MAX_MISSED_BEATS = 4  # beats, after which all threads are asked how long they waited: there are dozens
PHASES: tuple[Phase, ...] = ("idle", "building", "loading", "training", "evaluating", "saving")
_BEAT_TIME, _PHASE_TIME, _PHASE, _LOOP_THREAD, _STEP, _STEP_NS, _NUM_SAMPLES, _NUM_WAITING, _NUM_URGENT = range(9)
_FIELD_BYTES = 8 * 9
_MEMFD_NAME = "raytrain-heartbeat"


class Heartbeat:
    """A worker's side. SIGUSR1 has it write what its threads are at, even while one of them holds the interpreter."""

    def __init__(self, blocking_files: tuple[str, ...] = ()) -> None:
        """`blocking_files`: the source files in which the loop waits for other ranks instead of working."""
        self._blocking_files = blocking_files
        descriptor = os.memfd_create(_MEMFD_NAME)
        os.ftruncate(descriptor, _FIELD_BYTES)
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        self._fields = memoryview(mmap.mmap(descriptor, _FIELD_BYTES)).cast("q")
        os.lseek(descriptor, _FIELD_BYTES, os.SEEK_SET)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True)
        self._last_commit_ns, self._loop_thread = 0, 0
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    def set_phase(self, phase: Phase) -> None:
        """The loop, which is the calling thread, has come to something new."""
        self._fields[_PHASE], self._fields[_LOOP_THREAD] = PHASES.index(phase), threading.get_native_id()
        self._loop_thread = threading.get_ident()
        self._fields[_PHASE_TIME] = time.monotonic_ns()

    def record_commit(self, step: int) -> None:
        """A step is committed: the time since the one before is how long it took."""
        now = time.monotonic_ns()
        if self._last_commit_ns and self._fields[_STEP] == step - 1:
            self._fields[_STEP_NS] = now - self._last_commit_ns
        self._last_commit_ns, self._fields[_STEP] = now, step

    def notify_urgent(self) -> None:
        """There is one more record that the driver should fetch at once. One thread at a time."""
        self._fields[_NUM_URGENT] += 1

    def _beat_forever(self) -> None:
        set_thread_name("heartbeat")
        while True:
            self._fields[_BEAT_TIME] = time.monotonic_ns()
            if PHASES[self._fields[_PHASE]] == "training":
                self._sample_stack()
            time.sleep(BEAT_INTERVAL_S)

    def _sample_stack(self) -> None:
        """Count whether the loop is waiting for other ranks: one look says little, many say for which share of time."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is not None:
            self._fields[_NUM_SAMPLES] += 1
            self._fields[_NUM_WAITING] += frame.f_code.co_filename in self._blocking_files


class HeartbeatReader:
    """A watcher's side: the file of one worker."""

    def __init__(self, pid: int, path: Path):
        """Raises OSError where there is no such worker any more."""
        if _MEMFD_NAME not in os.readlink(path):
            raise FileNotFoundError(f"process {pid} is another one than it was: {path} is no heartbeat")
        self.pid = pid
        self._stacks = path.open()
        self._fields = memoryview(mmap.mmap(self._stacks.fileno(), _FIELD_BYTES, prot=mmap.PROT_READ)).cast("q")
        self._stacks.seek(_FIELD_BYTES)
        # How long the loop had waited for a CPU, of all its life, when it beat and when it marked last.
        self._last_beat, self._last_phase_change, self._cpu_wait_s = (0, 0.0), (0, 0.0), 0.0
        # The other threads, as seen since beats began to be missed, and how long all of them waited since then.
        self._other_threads: dict[int, _ThreadWait] = {}
        self._other_wait_s = 0.0

    def read(self, rank: int) -> WorkerHealth:
        """What can be seen of it now."""
        fields = self._fields.tolist()
        state, waited = _read_state(self.pid), _read_cpu_wait_s(self.pid, fields[_LOOP_THREAD], self._cpu_wait_s)
        self._cpu_wait_s = waited
        if fields[_BEAT_TIME] != self._last_beat[0]:
            self._last_beat = fields[_BEAT_TIME], waited
        if fields[_PHASE_TIME] != self._last_phase_change[0]:
            self._last_phase_change = fields[_PHASE_TIME], waited
        now = time.monotonic_ns()
        silent_s = (now - fields[_BEAT_TIME]) / 1e9 - (waited - self._last_beat[1])
        return WorkerHealth(
            rank=rank,
            is_alive=state not in "ZX",
            is_frozen=state in "Tt",
            heartbeat_age_s=silent_s - self._measure_other_wait_s(fields[_LOOP_THREAD], silent_s),
            progress_age_s=(now - fields[_PHASE_TIME]) / 1e9 - (waited - self._last_phase_change[1]),
            phase=PHASES[fields[_PHASE]],
            step=fields[_STEP],
            step_s=fields[_STEP_NS] / 1e9 or None,
            num_samples=fields[_NUM_SAMPLES],
            num_waiting_samples=fields[_NUM_WAITING],
            num_urgent_records=fields[_NUM_URGENT],
        )

    def _measure_other_wait_s(self, loop_thread: int, silent_s: float) -> float:
        """Seconds that threads beside the loop have waited for a CPU since beats began to be missed.

        Whichever of them has the interpreter, and the one that beats, keep the process silent while they wait; a thread
        that waits for the interpreter waits for no CPU, so that one which holds it for ever is found out all the same.
        """
        if silent_s < _MAX_MISSED_BEATS * BEAT_INTERVAL_S:
            self._other_threads, self._other_wait_s = {}, 0.0
            return 0.0
        waited = 0.0
        for thread in _list_threads(self.pid):
            if thread != loop_thread and (times := _read_sched_times_s(self.pid, thread)) is not None:
                seen = self._other_threads.setdefault(thread, _ThreadWait(*times))
                waited += seen.measure_s(*times, state=_read_state(self.pid, thread))
        # Never less than before: of a process that is being killed threads go one by one.
        self._other_wait_s = max(self._other_wait_s, waited)
        return self._other_wait_s

    def request_stacks(self) -> None:
        """Have it write what its threads are at."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def read_stacks(self, deadline: float) -> str:
        """What it has written of that until then (time.monotonic): its Python, and nothing of a frozen process."""
        text, grew = self._stacks.read(), time.monotonic()
        while time.monotonic() < deadline and not (text and time.monotonic() - grew > _STACKS_QUIET_S):
            time.sleep(0.002)
            if more := self._stacks.read():
                text, grew = text + more, time.monotonic()
        return text


class _ThreadWait:
    """How long a thread has waited for a CPU since it was seen first. The kernel counts a wait when it is over."""

    def __init__(self, cpu_s: float, wait_s: float):
        self._initial_wait_s, self._cpu_s, self._waiting_since = wait_s, cpu_s, time.monotonic()

    def measure_s(self, cpu_s: float, wait_s: float, *, state: str) -> float:
        """With what goes on: ready to run, and not having run, since it was last seen otherwise."""
        if state != "R" or cpu_s != self._cpu_s:
            self._cpu_s, self._waiting_since = cpu_s, time.monotonic()
        return wait_s - self._initial_wait_s + time.monotonic() - self._waiting_since


def set_thread_name(name: str) -> None:
    """Let the operating system know the calling thread by this name, of at most 15 characters."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _read_state(pid: int, thread: int | None = None) -> str:
    """The kernel's letter for the state of a process, or of one of its threads; X where there is none."""
    place = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        return Path(place).read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _list_threads(pid: int) -> list[int]:
    """Threads of a process; none where it has gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _read_cpu_wait_s(pid: int, thread: int, default: float) -> float:
    """Seconds that a thread was ready to run and had no CPU.

    `otherwise`: what was read last, which stands where the kernel does not say: of a process that has been killed,
    threads go before it does, and the time that it waited in its life would count as silence.
    """
    times = _read_sched_times_s(pid, thread)
    return default if times is None else times[1]


def _read_sched_times_s(pid: int, thread: int) -> tuple[float, float] | None:
    """Seconds that a thread ran, and that it was ready to run and had no CPU; None where the kernel does not say."""
    try:
        ran, waited = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[:2]
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return None
