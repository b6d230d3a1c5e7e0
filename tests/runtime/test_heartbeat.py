"""Heartbeats read from another process: of a worker that works, is frozen, holds the GIL, or waits for a CPU."""

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

def wait_for_the_first_cpu(thread):
    os.sched_setaffinity(thread, {min(os.sched_getaffinity(thread))})
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

def loop():
    heartbeat = Heartbeat()
    print(heartbeat.path, flush=True)
    for step in range(1, 11):
        heartbeat.set_phase("training")
        time.sleep(0.02)
        heartbeat.record_commit(step)
    control = ControlChannel(heartbeat=heartbeat)
    for kind in ("step", "shard", "note", "shard"):
        control.emit({"type": kind})
    print("ten", flush=True)
    sys.stdin.readline()
    if sys.argv[1] == "starve":  # spin in another thread than the loop, on a CPU that is busy
        for thread in map(int, os.listdir("/proc/self/task")):
            wait_for_the_first_cpu(thread)
        threading.Thread(target=spin, daemon=True).start()
    if sys.argv[1] == "starve_loop":
        wait_for_the_first_cpu(threading.get_native_id())
        spin()
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
    reader = HeartbeatReader(process.pid, path)
    assert process.stdout.readline() == "ten\n"
    yield process, reader, path
    process.kill()
    process.communicate()


def wait_for_health(reader: HeartbeatReader, condition: Callable[[WorkerHealth], bool]) -> WorkerHealth:
    deadline = time.monotonic() + 30
    while not condition(health := reader.read(3)):
        assert time.monotonic() < deadline, health
        time.sleep(0.02)
    return health


def refuse_schedstat(read_text: Callable[..., str]) -> Callable[..., str]:
    def read(path: Path, *arguments: str) -> str:
        if path.name == "schedstat":
            raise FileNotFoundError(path)
        return read_text(path, *arguments)

    return read


def read_stacks(reader: HeartbeatReader) -> str:
    reader.request_stacks()
    return reader.read_stacks(time.monotonic() + 1)


def test_health_of_a_working_worker(worker) -> None:
    process, reader, path = worker
    health = reader.read(3)
    assert (health.rank, health.is_alive, health.is_frozen, health.phase, health.step) == (
        3,
        True,
        False,
        "training",
        10,
    )
    assert health.num_urgent_records == 2  # records of checkpoint shards
    assert health.step_s is not None and 0.02 <= health.step_s < 10
    assert health.progress_age_s > 0 and health.heartbeat_age_s < health.progress_age_s + 10
    second_reader = HeartbeatReader(process.pid, path)  # a monitor that replaces one that ended
    assert second_reader.read(3).step == 10 and "in loop" in read_stacks(second_reader)
    process.kill()
    process.wait()
    assert not reader.read(3).is_alive and not second_reader.read(3).is_alive
    with pytest.raises(OSError, match="No such file"):
        HeartbeatReader(process.pid, path)


def test_process_that_reuses_the_pid_is_not_a_worker(tmp_path: Path) -> None:
    """Its file with that descriptor is not a heartbeat."""
    with (tmp_path / "other").open("w") as file, pytest.raises(FileNotFoundError, match="is not a heartbeat"):
        HeartbeatReader(os.getpid(), Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"))


def test_worker_that_is_being_killed_does_not_look_silent(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of its loop ends before the process, and with it the kernel's record of its CPU wait."""
    process, reader, _ = worker
    schedstat_file = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat")
    original = Path.read_text
    schedstat = "0 9000000000 0"  # since it started
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *arguments: schedstat if path.name == "schedstat" else original(path, *arguments),
    )
    assert schedstat_file.exists() and reader.read(3).heartbeat_age_s < 2

    monkeypatch.setattr(Path, "read_text", refuse_schedstat(original))
    health = reader.read(3)
    assert health.heartbeat_age_s < 2 and health.progress_age_s < 5


def test_frozen_worker_and_its_continuation(worker) -> None:
    process, reader, _ = worker
    os.kill(process.pid, signal.SIGSTOP)
    health = wait_for_health(reader, lambda health: health.heartbeat_age_s > 0.3)
    assert health.is_frozen and health.is_alive
    os.kill(process.pid, signal.SIGCONT)
    health = wait_for_health(reader, lambda health: health.heartbeat_age_s < 0.2)
    assert not health.is_frozen


def test_silence_that_nobody_observed_does_not_count(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that had no CPU for a while cannot know whether the threads of the worker had one."""
    process, reader, _ = worker
    assert reader.read(3).heartbeat_age_s < 1
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    start = time.monotonic()
    assert reader.read(3).heartbeat_age_s < 0.5
    monkeypatch.setattr(Path, "read_text", refuse_schedstat(Path.read_text))  # as kernels do that do not record it
    assert wait_for_health(reader, lambda health: health.heartbeat_age_s > 1).is_frozen
    assert time.monotonic() - start > 0.5


@pytest.mark.parametrize("worker", ["hold", "spin"], indirect=True)
def test_worker_that_holds_the_gil_or_spins(worker) -> None:
    process, reader, _ = worker
    process.stdin.write("\n")
    process.stdin.flush()
    if process.args[-1] == "hold":
        assert not wait_for_health(reader, lambda health: health.heartbeat_age_s > 0.5).is_frozen
    else:
        before = reader.read(3).progress_age_s
        health = wait_for_health(reader, lambda health: health.progress_age_s > before + 0.5)
        assert health.heartbeat_age_s < 0.5
    assert "in loop" in read_stacks(reader)


@pytest.mark.parametrize("worker", ["starve", "starve_loop"], indirect=True)
def test_thread_that_holds_the_gil_without_a_cpu_is_no_silence(worker) -> None:
    """While it waits for a CPU no beats are written, which is not a fault."""
    process, reader, _ = worker
    busy = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    competitors = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(6)]
    try:
        time.sleep(0.5)
        process.stdin.write("\n")
        process.stdin.flush()
        silent, counted, start = 0.0, 0.0, time.monotonic()
        while (elapsed := time.monotonic() - start) < 4 or (silent <= 1 and elapsed < 30):
            silent = max(silent, (time.monotonic_ns() - reader._fields[0]) / 1e9)  # for any reason
            counted = max(counted, reader.read(3).heartbeat_age_s)
            time.sleep(0.02)
    finally:
        for competitor in competitors:
            competitor.kill()
            competitor.wait()
    assert silent > 1 and counted < silent / 2  # the kernel counts a wait when it is over
