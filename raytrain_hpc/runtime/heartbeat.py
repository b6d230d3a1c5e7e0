"""Heartbeat of a worker in shared memory, which a monitor reads without the worker's interpreter.

Each worker has one small anonymous file in memory (memfd), which vanishes with its process and is opened through /proc.
Only the worker writes it, each field in one store of eight bytes: a thread writes beats, and the loop writes its phase.
On request and on a fatal signal, the stacks of its threads are appended. Times are of CLOCK_MONOTONIC, which all
processes of a node share.
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
from raytrain_hpc.runtime.published_memory import PublishedMemory

BEAT_INTERVAL_S = 0.05
_STACKS_QUIET_S = 0.01  # without new output, after which stacks are complete
_MAX_MISSED_BEATS = 4  # until the CPU wait of all threads is read, of which there are dozens
PHASES: tuple[Phase, ...] = ("idle", "building", "loading", "training", "evaluating", "saving", "callback")
_BEAT_TIME, _PHASE_TIME, _PHASE, _LOOP_THREAD, _STEP, _STEP_NS, _NUM_SAMPLES, _NUM_WAITING, _NUM_URGENT = range(9)
_MEMORY_FILE = 9  # number of publications of PublishedMemory, times 2**32, plus the descriptor of the last one's file
_FIELD_BYTES = 8 * 10
_MEMFD_NAME, _MEMORY_NAME = "raytrain-heartbeat", "raytrain-memory"


class Heartbeat:
    """The worker's side of a heartbeat.

    On SIGUSR1 it writes its stacks, even while a thread holds the GIL, and on a fatal signal its last ones.
    """

    def __init__(self, blocking_files: tuple[str, ...] = ()) -> None:
        """Start to beat. `blocking_files`: the source files in which the loop waits for other ranks."""
        self._blocking_files = blocking_files
        descriptor = os.memfd_create(_MEMFD_NAME)
        os.ftruncate(descriptor, _FIELD_BYTES)
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        self._fields = memoryview(mmap.mmap(descriptor, _FIELD_BYTES)).cast("q")
        os.lseek(descriptor, _FIELD_BYTES, os.SEEK_SET)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True)
        faulthandler.enable(descriptor, all_threads=True)  # the file outlives the process in the agent of its node
        self._last_commit_ns, self._loop_thread = 0, 0
        self._memory_file, self._num_published = 0, 0
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    def set_phase(self, phase: Phase) -> None:
        """Set the phase of the loop, which is the calling thread."""
        self._fields[_PHASE], self._fields[_LOOP_THREAD] = PHASES.index(phase), threading.get_native_id()
        self._loop_thread = threading.get_ident()
        self._fields[_PHASE_TIME] = time.monotonic_ns()

    def record_commit(self, step: int) -> None:
        """Record a committed step. Its duration is the time since the previous one."""
        now = time.monotonic_ns()
        if self._last_commit_ns and self._fields[_STEP] == step - 1:
            self._fields[_STEP_NS] = now - self._last_commit_ns
        self._last_commit_ns, self._fields[_STEP] = now, step

    def notify_urgent(self) -> None:
        """Count one more record that the driver should fetch at once. Not thread-safe."""
        self._fields[_NUM_URGENT] += 1

    def publish_memory(self, memory: PublishedMemory) -> None:
        """Tell the agent of this node which shared memory of this worker to hold open, instead of earlier memory."""
        previous, self._memory_file = self._memory_file, os.memfd_create(_MEMORY_NAME)
        os.pwrite(self._memory_file, memory.to_json().encode(), 0)
        self._num_published += 1
        self._fields[_MEMORY_FILE] = self._num_published * 2**32 + self._memory_file
        if previous:
            os.close(previous)

    def _beat_forever(self) -> None:
        set_thread_name("heartbeat")
        while True:
            self._fields[_BEAT_TIME] = time.monotonic_ns()
            if PHASES[self._fields[_PHASE]] == "training":
                self._sample_stack()
            time.sleep(BEAT_INTERVAL_S)

    def _sample_stack(self) -> None:
        """Sample whether the loop waits for other ranks. Many samples give the fraction of time that it waits."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is not None:
            self._fields[_NUM_SAMPLES] += 1
            self._fields[_NUM_WAITING] += frame.f_code.co_filename in self._blocking_files


class HeartbeatReader:
    """The monitor's side of a heartbeat: reads the file of one worker."""

    def __init__(self, pid: int, path: Path):
        """Open the file. Raises OSError if the worker no longer exists."""
        if _MEMFD_NAME not in os.readlink(path):
            raise FileNotFoundError(f"process {pid} is no longer the worker: {path} is not a heartbeat")
        self.pid = pid
        self._stacks = path.open()
        self._fields = memoryview(mmap.mmap(self._stacks.fileno(), _FIELD_BYTES, prot=mmap.PROT_READ)).cast("q")
        self._stacks.seek(_FIELD_BYTES)
        # (time, total CPU wait of the loop by then) of the last beat and the last change of phase.
        self._last_beat, self._last_phase_change = (0, 0.0), (0, 0.0)
        self._loop_waits: dict[int, _ThreadWait] = {}  # of each thread that has been the loop
        self._memory_word, self._memory = 0, PublishedMemory(0)
        # The other threads since beats began to be missed, and their total CPU wait since then.
        self._other_threads: dict[int, _ThreadWait] = {}
        self._other_wait_s = 0.0
        self._unobserved_s: float | None = None  # of the current silence

    def read(self, rank: int) -> WorkerHealth:
        """Return the current health of the worker."""
        fields = self._fields.tolist()
        state, cpu_wait_s = _read_state(self.pid), self._measure_loop_wait_s(fields[_LOOP_THREAD])
        if fields[_BEAT_TIME] != self._last_beat[0]:
            self._last_beat = fields[_BEAT_TIME], cpu_wait_s
        if fields[_PHASE_TIME] != self._last_phase_change[0]:
            self._last_phase_change = fields[_PHASE_TIME], cpu_wait_s
        now = time.monotonic_ns()
        silent_s = (now - fields[_BEAT_TIME]) / 1e9 - (cpu_wait_s - self._last_beat[1])
        return WorkerHealth(
            rank=rank,
            is_alive=state not in "ZX",
            is_frozen=state in "Tt",
            heartbeat_age_s=silent_s - self._measure_other_wait_s(fields[_LOOP_THREAD], silent_s),
            progress_age_s=(now - fields[_PHASE_TIME]) / 1e9 - (cpu_wait_s - self._last_phase_change[1]),
            phase=PHASES[fields[_PHASE]],
            step=fields[_STEP],
            step_s=fields[_STEP_NS] / 1e9 or None,
            num_samples=fields[_NUM_SAMPLES],
            num_waiting_samples=fields[_NUM_WAITING],
            num_urgent_records=fields[_NUM_URGENT],
            last_beat_unix=time.time() - (now - fields[_BEAT_TIME]) / 1e9,
        )

    def read_memory(self) -> PublishedMemory:
        """Return what the worker has published last; generation 0 if that is nothing."""
        word = self._fields[_MEMORY_FILE]
        if word != self._memory_word:
            path = Path(f"/proc/{self.pid}/fd/{word % 2**32}")
            with contextlib.suppress(OSError, ValueError):  # the worker has ended, or published again meanwhile
                if _MEMORY_NAME in os.readlink(path):
                    self._memory, self._memory_word = PublishedMemory.from_json(path.read_text()), word
        return self._memory

    def _measure_loop_wait_s(self, loop_thread: int) -> float:
        """Return the seconds that the loop waited for a CPU since its first reading.

        Threads of a killed process end before it does: a wait that can no longer be read keeps its last value, since
        earlier waits would count as silence otherwise.
        """
        if (times := _read_sched_times_s(self.pid, loop_thread)) is not None:
            thread_wait = self._loop_waits.setdefault(loop_thread, _ThreadWait(*times))
            thread_wait.update(*times, state=_read_state(self.pid, loop_thread))
        return sum(thread_wait.wait_s for thread_wait in self._loop_waits.values())

    def _measure_other_wait_s(self, loop_thread: int, silent_s: float) -> float:
        """Return the seconds that other threads than the loop waited for a CPU since beats began to be missed.

        While the thread that holds the GIL or the beating thread waits for a CPU, the process is silent without being
        at fault. A thread that waits for the GIL waits for no CPU, so that a GIL held forever is still detected. The
        time before the first reading counts as a wait too, since how long the threads waited then is unknown.
        """
        max_silent_s = _MAX_MISSED_BEATS * BEAT_INTERVAL_S
        if silent_s < max_silent_s:
            self._other_threads, self._other_wait_s, self._unobserved_s = {}, 0.0, None
            return 0.0
        if self._unobserved_s is None:  # the first reading of this silence, late if the reader itself had no CPU
            self._unobserved_s = silent_s - max_silent_s
        wait_s = self._unobserved_s
        for thread_id in _list_threads(self.pid):
            if thread_id != loop_thread and (times := _read_sched_times_s(self.pid, thread_id)) is not None:
                thread_wait = self._other_threads.setdefault(thread_id, _ThreadWait(*times))
                thread_wait.update(*times, state=_read_state(self.pid, thread_id))
                wait_s += thread_wait.wait_s
        # Never less than before: the threads of a process that is being killed end one by one.
        self._other_wait_s = max(self._other_wait_s, wait_s)
        return self._other_wait_s

    def request_stacks(self) -> None:
        """Ask the worker to write the stacks of its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def read_last_output(self) -> str:
        """Return what the process wrote since its stacks were last read. Also works when it has died."""
        return self._stacks.read()

    def read_stacks(self, deadline: float) -> str:
        """Return the Python stacks written until `deadline` (time.monotonic). A frozen process writes none."""
        text, last_output_s = self._stacks.read(), time.monotonic()
        while time.monotonic() < deadline and not (text and time.monotonic() - last_output_s > _STACKS_QUIET_S):
            time.sleep(0.002)
            if new_text := self._stacks.read():
                text, last_output_s = text + new_text, time.monotonic()
        return text


class _ThreadWait:
    """CPU wait of a thread since it was first seen. The kernel counts a wait only once it is over."""

    def __init__(self, cpu_s: float, wait_s: float):
        self._initial_wait_s, self._cpu_s, self._waiting_since = wait_s, cpu_s, time.monotonic()
        self.wait_s = 0.0

    def update(self, cpu_s: float, wait_s: float, *, state: str) -> None:
        """Measure the wait, including a current one: the thread is ready, and has not run since it was last seen."""
        if state != "R" or cpu_s != self._cpu_s:
            self._cpu_s, self._waiting_since = cpu_s, time.monotonic()
        self.wait_s = wait_s - self._initial_wait_s + time.monotonic() - self._waiting_since


def set_thread_name(name: str) -> None:
    """Set the name of the calling thread in the operating system, of at most 15 characters."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _read_state(pid: int, thread_id: int | None = None) -> str:
    """Return the kernel's letter for the state of a process or thread; X if it does not exist."""
    path = f"/proc/{pid}/stat" if thread_id is None else f"/proc/{pid}/task/{thread_id}/stat"
    try:
        return Path(path).read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _list_threads(pid: int) -> list[int]:
    """Return the threads of a process; none if it does not exist."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _read_sched_times_s(pid: int, thread_id: int) -> tuple[float, float] | None:
    """Return the seconds that a thread ran, and that it waited for a CPU; None if they cannot be read."""
    try:
        run_ns, wait_ns = Path(f"/proc/{pid}/task/{thread_id}/schedstat").read_text().split()[:2]
        return int(run_ns) / 1e9, int(wait_ns) / 1e9
    except (OSError, ValueError):
        return None
