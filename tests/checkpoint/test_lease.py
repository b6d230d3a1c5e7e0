"""One driver a run directory: alive, dead, elsewhere, stale, released."""

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

from raytrain_hpc.checkpoint import lease
from raytrain_hpc.checkpoint.lease import Lease, check_writable
from raytrain_hpc.errors import LeaseLostError, RunDirectoryError

HOLDER = """
import sys, time
from pathlib import Path
from raytrain_hpc.checkpoint.lease import Lease
print(Lease.acquire(Path(sys.argv[1]), "other").generation, flush=True)
time.sleep(60)
"""


def content(directory):
    return json.loads((directory / "lease.json").read_text())


def edit(directory, **fields):
    (directory / "lease.json").write_text(json.dumps({**content(directory), **fields}))


@pytest.fixture
def other(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_live_driver_is_refused_and_a_dead_one_taken_over(tmp_path, other):
    with pytest.raises(
        RunDirectoryError, match=rf"run.dir {tmp_path}: another driver \(\S+, pid {other.pid}\) is running"
    ):
        Lease.acquire(tmp_path, "me")
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(RunDirectoryError):
        Lease.acquire(tmp_path, "me")
    os.kill(other.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":  # not reaped yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease = Lease.acquire(tmp_path, "me")
    assert lease.generation == 2 and content(tmp_path)["owner"] == "me"
    lease.check()


def test_a_pid_that_came_back_as_another_process_is_not_the_owner(tmp_path):
    Lease.acquire(tmp_path, "first")
    edit(tmp_path, started=content(tmp_path)["started"] - 1)
    assert Lease.acquire(tmp_path, "second").generation == 2


def test_the_same_process_cannot_hold_it_twice_but_again_after_release(tmp_path):
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


def test_another_host_counts_by_its_last_sign_of_life(tmp_path):
    Lease.acquire(tmp_path, "first")
    edit(tmp_path, host="elsewhere", renewed=time.time() - 10)
    with pytest.raises(RunDirectoryError, match="elsewhere"):
        Lease.acquire(tmp_path, "second")
    assert Lease.acquire(tmp_path, "second", stale_after_s=5).generation == 2


def test_renewing_and_new_generations(tmp_path):
    lease = Lease.acquire(tmp_path, "me")
    before = content(tmp_path)
    time.sleep(0.01)
    lease.renew()
    assert content(tmp_path)["renewed"] > before["renewed"] and content(tmp_path)["generation"] == 1
    assert lease.next_generation() == lease.generation == content(tmp_path)["generation"] == 2
    lease.check()
    lease.release()
    with pytest.raises(LeaseLostError):
        Lease(tmp_path, lease._record.__class__(**before)).check()
    assert Lease.acquire(tmp_path, "me").generation == 3


def test_a_generation_begun_while_the_lease_is_renewed_and_checked(tmp_path, monkeypatch):
    """Renewing behind the run must not bring the generation before back, nor take the new one for another driver's."""
    held, written, go = Lease.acquire(tmp_path, "driver"), threading.Event(), threading.Event()
    real = lease._write

    def slow(directory, holder):
        real(directory, holder)
        if holder.generation == 2 and not written.is_set():
            written.set()
            assert go.wait(10)

    monkeypatch.setattr(lease, "_write", slow)
    with ThreadPoolExecutor(3) as pool:
        begun = pool.submit(held.next_generation)
        assert written.wait(10)
        beside = [pool.submit(held.renew), pool.submit(held.check)]
        wait(beside, timeout=0.3, return_when=FIRST_EXCEPTION)
        go.set()
        assert begun.result(10) == 2
        for one in beside:
            one.result(10)
    assert held.generation == 2 == content(tmp_path)["generation"]


def test_a_directory_that_is_gone_for_a_while_is_not_lost(tmp_path):
    """A generation that begins meanwhile is written down when it is back."""
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
    assert content(tmp_path / "run")["generation"] == 2


def test_a_lease_that_is_gone_or_garbage_is_lost(tmp_path):
    lease = Lease.acquire(tmp_path, "me")
    (tmp_path / "lease.json").write_text("{")
    for call in (lease.check, lambda: Lease.acquire(tmp_path, "second")):
        with pytest.raises(RunDirectoryError, match="lease.json is no lease"):
            call()
    (tmp_path / "lease.json").unlink()
    with pytest.raises(LeaseLostError, match="gone"):
        lease.check()


def test_of_many_that_start_at_once_one_wins(tmp_path):
    won, refused = [], []
    start = threading.Barrier(8)

    def contend(number):
        start.wait()
        try:
            won.append(Lease.acquire(tmp_path, f"driver {number}"))
        except RunDirectoryError as error:
            refused.append(error)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 7
    won[0].check()


def test_probe_leaves_nothing_and_names_what_is_wrong(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == [], "the directories that it made are gone too"
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
        with pytest.raises(RunDirectoryError, match=f"run.dir {path} cannot be written: {reason}"):
            check_writable(path)
        with pytest.raises(RunDirectoryError, match=reason):
            Lease.acquire(path, "me")


def test_probe_of_a_directory_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    pid = os.fork()
    if pid == 0:
        outcome = 1
        try:
            if os.geteuid() == 0:  # root may write everywhere: go on as nobody
                os.setuid(65534)
            check_writable(tmp_path)
        except RunDirectoryError as error:
            outcome = 0 if "cannot be written: Permission denied" in str(error) else 2
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
