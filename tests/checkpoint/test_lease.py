"""One driver per run directory, whether the other one is alive, dead, on another host, stale or has released it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from raytrain_hpc.checkpoint.lease import Lease, check_writable
from raytrain_hpc.checkpoint.lease_file import LocalLeaseFile
from raytrain_hpc.errors import LeaseLostError, RunDirectoryError

HOLDER = """
import sys, time
from pathlib import Path
from raytrain_hpc.checkpoint.lease import Lease
print(Lease.acquire(Path(sys.argv[1]), "other").generation, flush=True)
time.sleep(60)
"""


def read_lease(directory):
    return json.loads((directory / "lease.json").read_text())


def edit_lease(directory, **fields):
    """Replace the lease atomically, as a driver does: another thread may read it meanwhile."""
    edited = directory / "lease.json.edited"
    edited.write_text(json.dumps({**read_lease(directory), **fields}))
    edited.replace(directory / "lease.json")


@pytest.fixture
def other_driver(tmp_path):
    """Another process that holds the lease."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_lease_of_a_dead_driver_is_taken_over_and_that_of_a_live_one_is_not(tmp_path, other_driver):
    pid = other_driver.pid
    with pytest.raises(RunDirectoryError, match=rf"run.dir={tmp_path}: another driver \(\S+, pid {pid}\) is running"):
        Lease.acquire(tmp_path, "me")
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RunDirectoryError):
        Lease.acquire(tmp_path, "me")
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":  # not reaped yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease = Lease.acquire(tmp_path, "me")
    assert lease.generation == 2 and read_lease(tmp_path)["owner"] == "me"
    lease.check()


def test_a_reused_pid_is_not_taken_for_the_holder(tmp_path):
    Lease.acquire(tmp_path, "first")
    edit_lease(tmp_path, started=read_lease(tmp_path)["started"] - 1)
    assert Lease.acquire(tmp_path, "second").generation == 2


def test_one_process_cannot_acquire_it_twice_before_release(tmp_path):
    first = Lease.acquire(tmp_path / "new" / "run", "first")
    with pytest.raises(RunDirectoryError, match="choose another run.dir"):
        Lease.acquire(tmp_path / "new" / "run", "second")
    first.release()
    second = Lease.acquire(tmp_path / "new" / "run", "second")
    assert second.generation == 2
    for call in (first.check, first.renew, first.next_generation, first.release):
        with pytest.raises(LeaseLostError, match="taken over by second"):
            call()
    second.check()


def test_a_lease_of_another_host_expires_without_renewal(tmp_path):
    Lease.acquire(tmp_path, "first")
    edit_lease(tmp_path, host="elsewhere", renewed=time.time() - 10)
    with pytest.raises(RunDirectoryError, match="elsewhere"):
        Lease.acquire(tmp_path, "second")
    assert Lease.acquire(tmp_path, "second", stale_after_s=5).generation == 2


def test_a_restart_on_another_host_waits_until_the_lease_is_abandoned_and_no_longer_if_it_is_renewed(tmp_path):
    lease, lines = Lease.acquire(tmp_path, "first"), []
    edit_lease(tmp_path, host="elsewhere", renewed=time.time() - 1.5)
    Lease.wait_until_available(tmp_path, lines.append, stale_after_s=2.0, poll_interval_s=0.02)
    assert Lease.acquire(tmp_path, "second", stale_after_s=2.0).generation == 2
    assert len(lines) == 1 and "elsewhere" in lines[0] and "renewed it 2 s ago" in lines[0]

    edit_lease(tmp_path, host="elsewhere", renewed=time.time())
    renewal = threading.Timer(0.3, edit_lease, [tmp_path], {"renewed": time.time() + 0.3})
    renewal.start()
    start = time.monotonic()
    with pytest.raises(RunDirectoryError, match="elsewhere"):
        Lease.wait_until_available(tmp_path, lines.append, poll_interval_s=0.02)
    renewal.join()
    assert 0.2 < time.monotonic() - start < 5 and len(lines) == 2

    edit_lease(tmp_path, renewed=time.time() + 3600)  # the clock of the other host is ahead
    with pytest.raises(RunDirectoryError, match="elsewhere"):
        Lease.wait_until_available(tmp_path, lines.append, stale_after_s=0.3, poll_interval_s=0.02)
    with pytest.raises(LeaseLostError):
        lease.check()


def test_the_lease_of_a_driver_on_this_host_is_not_awaited(tmp_path):
    Lease.acquire(tmp_path, "first")
    with pytest.raises(RunDirectoryError, match="another driver"):
        Lease.wait_until_available(tmp_path, lambda line: pytest.fail("it must not wait"))


def test_renewal_and_new_generations_are_written_to_the_file(tmp_path):
    lease = Lease.acquire(tmp_path, "me")
    before = read_lease(tmp_path)
    time.sleep(0.01)
    lease.renew()
    assert read_lease(tmp_path)["renewed"] > before["renewed"] and read_lease(tmp_path)["generation"] == 1
    assert lease.next_generation() == lease.generation == read_lease(tmp_path)["generation"] == 2
    lease.check()
    lease.release()
    with pytest.raises(LeaseLostError):
        Lease(tmp_path, lease._record.__class__(**before)).check()
    assert Lease.acquire(tmp_path, "me").generation == 3


def test_renewing_and_checking_during_next_generation_neither_undo_it_nor_raise(tmp_path, monkeypatch):
    lease, is_written, may_continue = Lease.acquire(tmp_path, "driver"), threading.Event(), threading.Event()
    write = LocalLeaseFile._write

    def write_and_pause(file, record):
        write(file, record)
        if record.generation == 2 and not is_written.is_set():
            is_written.set()
            assert may_continue.wait(10)

    monkeypatch.setattr(LocalLeaseFile, "_write", write_and_pause)
    with ThreadPoolExecutor(3) as pool:
        next_generation = pool.submit(lease.next_generation)
        assert is_written.wait(10)
        concurrent = [pool.submit(lease.renew), pool.submit(lease.check)]
        wait(concurrent, timeout=0.3, return_when=FIRST_EXCEPTION)
        may_continue.set()
        assert next_generation.result(10) == 2
        for call in concurrent:
            call.result(10)
    assert lease.generation == 2 == read_lease(tmp_path)["generation"]


def test_the_lease_survives_a_directory_that_is_gone_for_a_while(tmp_path):
    """A generation that starts meanwhile is written to the file once the directory is back."""
    lease = Lease.acquire(tmp_path / "run", "me")
    (tmp_path / "run").rename(tmp_path / "away")
    for call in (lease.check, lease.renew):
        with pytest.raises(RunDirectoryError) as raised:
            call()
        assert not isinstance(raised.value, LeaseLostError)
    assert lease.next_generation() == lease.generation == 2
    assert not (tmp_path / "run").exists()
    (tmp_path / "away").rename(tmp_path / "run")
    lease.check()
    lease.renew()
    assert read_lease(tmp_path / "run")["generation"] == 2


def test_an_unreadable_lease_file_is_an_error_and_a_deleted_one_is_lost(tmp_path):
    lease = Lease.acquire(tmp_path, "me")
    (tmp_path / "lease.json").write_text("{")
    for call in (lease.check, lambda: Lease.acquire(tmp_path, "second")):
        with pytest.raises(RunDirectoryError, match="lease.json is not a lease"):
            call()
    (tmp_path / "lease.json").unlink()
    with pytest.raises(LeaseLostError, match="gone"):
        lease.check()


def test_one_of_many_simultaneous_drivers_acquires_the_lease(tmp_path):
    leases, errors = [], []
    start = threading.Barrier(8)

    def acquire(number):
        start.wait()
        try:
            leases.append(Lease.acquire(tmp_path, f"driver {number}"))
        except RunDirectoryError as error:
            errors.append(error)

    threads = [threading.Thread(target=acquire, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 1 and len(errors) == 7
    leases[0].check()


def test_check_writable_leaves_no_file_and_names_the_reason(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == [], "the directories that it created are removed too"
    (tmp_path / "a").mkdir()
    check_writable(tmp_path / "a")
    assert list(tmp_path.iterdir()) == [tmp_path / "a"] and not any((tmp_path / "a").iterdir())
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "below", "Not a directory"),
        (Path("/proc"), "No such file"),
        (Path("/proc/none"), "No such file"),
    ):
        with pytest.raises(RunDirectoryError, match=f"run.dir={path}: cannot be written: {reason}"):
            check_writable(path)
        with pytest.raises(RunDirectoryError, match=reason):
            Lease.acquire(path, "me")


def test_check_writable_reports_a_missing_permission(tmp_path):
    tmp_path.chmod(0o500)
    pid = os.fork()
    if pid == 0:
        exit_code = 1
        try:
            if os.geteuid() == 0:  # root may write anywhere: continue as another user
                os.setuid(65534)
            check_writable(tmp_path)
        except RunDirectoryError as error:
            exit_code = 0 if "cannot be written: Permission denied" in str(error) else 2
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
