"""Signs of life, seen from another process: working, frozen, holding the interpreter, and only short of a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytrain_hpc.elastic.watchdog import WorkerHealth
from raytrain_hpc.runtime.heartbeat import HeartbeatReader

WORKER = """
import ctypes, os, sys, threading, time
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.heartbeat import Heartbeat

def spin():
    while True:
        pass

def loop():
    heart = Heartbeat()
    print(heart.path, flush=True)
    for step in range(1, 11):
        heart.set_phase("training")
        time.sleep(0.02)
        heart.record_commit(step)
    control = ControlChannel(heartbeat=heart)
    for kind in ("step", "shard", "note", "shard"):
        control.emit({"type": kind})
    print("ten", flush=True)
    sys.stdin.readline()
    if sys.argv[1] == "starve":  # from now on, beside a loop that sleeps, and on a CPU that others have
        for thread in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(thread, {min(os.sched_getaffinity(thread))})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        threading.Thread(target=spin, daemon=True).start()
    if sys.argv[1] == "hold":
        ctypes.PyDLL(None).sleep(60)
    while sys.argv[1] == "spin":
        pass
    time.sleep(60)

loop()
"""


@pytest.fixture(params=["wait"])
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], HeartbeatReader, Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    path = Path(process.stdout.readline().strip())
    pulse = HeartbeatReader(process.pid, path)
    assert process.stdout.readline() == "ten\n"
    yield process, pulse, path
    process.kill()
    process.communicate()


def seen(pulse: HeartbeatReader, holds: Callable[[WorkerHealth], bool]) -> WorkerHealth:
    deadline = time.monotonic() + 30
    while not holds(signs := pulse.read(3)):
        assert time.monotonic() < deadline, signs
        time.sleep(0.02)
    return signs


def stacks(pulse: HeartbeatReader) -> str:
    pulse.request_stacks()
    return pulse.read_stacks(time.monotonic() + 1)


def test_a_worker_that_works(worker) -> None:
    process, pulse, path = worker
    signs = pulse.read(3)
    assert (signs.rank, signs.alive, signs.frozen, signs.phase, signs.step) == (3, True, False, "training", 10)
    assert signs.urgent == 2  # shards of checkpoints
    assert signs.step_s is not None and 0.02 <= signs.step_s < 10
    assert signs.mark_age_s > 0 and signs.beat_age_s < signs.mark_age_s + 10
    another = HeartbeatReader(process.pid, path)  # a watcher that follows one that died
    assert another.read(3).step == 10 and "in loop" in stacks(another)
    process.kill()
    process.wait()
    assert not pulse.read(3).alive and not another.read(3).is_alive
    with pytest.raises(OSError, match="No such file"):
        HeartbeatReader(process.pid, path)


def test_a_process_that_came_to_the_same_number(tmp_path: Path) -> None:
    """Its file of that number is none of ours."""
    with (tmp_path / "other").open("w") as file, pytest.raises(FileNotFoundError, match="is no heartbeat"):
        HeartbeatReader(os.getpid(), Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"))


def test_who_is_being_killed_has_not_been_silent(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop's thread goes before the process does, and with it what is known of how long that waited for a CPU."""
    process, pulse, _ = worker
    file = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat")
    real = Path.read_text
    waited = "0 9000000000 0"  # of all its life
    monkeypatch.setattr(Path, "read_text", lambda path, *of: waited if path.name == "schedstat" else real(path, *of))
    assert file.exists() and pulse.read(3).beat_age_s < 2

    def gone(path: Path, *of: str) -> str:
        if path.name == "schedstat":
            raise FileNotFoundError(path)
        return real(path, *of)

    monkeypatch.setattr(Path, "read_text", gone)
    signs = pulse.read(3)
    assert signs.beat_age_s < 2 and signs.mark_age_s < 5


def test_a_frozen_one_and_one_that_goes_on(worker) -> None:
    process, pulse, _ = worker
    os.kill(process.pid, signal.SIGSTOP)
    signs = seen(pulse, lambda signs: signs.heartbeat_age_s > 0.3)
    assert signs.is_frozen and signs.is_alive
    os.kill(process.pid, signal.SIGCONT)
    signs = seen(pulse, lambda signs: signs.heartbeat_age_s < 0.2)
    assert not signs.is_frozen


@pytest.mark.parametrize("worker", ["hold", "spin"], indirect=True)
def test_who_holds_the_interpreter_and_who_only_keeps_busy(worker) -> None:
    process, pulse, _ = worker
    process.stdin.write("\n")
    process.stdin.flush()
    if process.args[-1] == "hold":
        assert not seen(pulse, lambda signs: signs.heartbeat_age_s > 0.5).is_frozen
    else:
        before = pulse.read(3).mark_age_s
        signs = seen(pulse, lambda signs: signs.progress_age_s > before + 0.5)
        assert signs.heartbeat_age_s < 0.5
    assert "in loop" in stacks(pulse)


@pytest.mark.parametrize("worker", ["starve"], indirect=True)
def test_a_thread_beside_the_loop_that_has_the_interpreter_and_no_cpu(worker) -> None:
    """No beat comes while it waits for a CPU, and nobody is to blame for that."""
    process, pulse, _ = worker
    busy = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(2)]
    try:
        time.sleep(0.5)
        process.stdin.write("\n")
        process.stdin.flush()
        silent, counted, deadline = 0.0, 0.0, time.monotonic() + 4
        while time.monotonic() < deadline:
            silent = max(silent, (time.monotonic_ns() - pulse._fields[0]) / 1e9)  # whatever for
            counted = max(counted, pulse.read(3).beat_age_s)
            time.sleep(0.02)
    finally:
        for one in others:
            one.kill()
            one.wait()
    assert silent > 1 and counted < silent / 2  # the kernel counts a wait when it is over
