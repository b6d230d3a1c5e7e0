"""Faults inflicted on a run from outside: on its processes, its directory, its disk, or the object store."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.data.loader.test_exactly_once import find_reader_processes
from tests.driver.loop_filesystem import Disk


def fill_disk_briefly(disk: Disk) -> None:
    disk.fill()
    time.sleep(3.0)
    disk.free()


def fail_disk_briefly(disk: Disk) -> None:
    disk.fail()
    time.sleep(5.0)
    disk.repair()


def freeze_disk(disk: Disk) -> None:
    disk.freeze(60.0)


def kill_readers(run_dir: Path) -> None:
    """Kill three of the processes that read the dataset, as soon as they run."""
    killed: set[int] = set()
    wait_until(lambda: count_steps(run_dir) >= 10, 0.01)
    while len(killed) < 3:
        pids = set(find_reader_processes()) - killed
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.02)
    record_fault_time(run_dir)


def fill_object_store(run_dir: Path) -> None:
    """Fill the object store with objects that stay in use until the run ends."""
    import ray

    @ray.remote(num_cpus=0)
    class Hog:
        def fill(self, size: int) -> int:
            self.held = [ray.put(np.ones(size // 8, np.uint8)) for _ in range(8)]
            self.used = [ray.get(ref) for ref in self.held]
            return sum(array.nbytes for array in self.used)

    wait_until(lambda: count_steps(run_dir) >= 10, 0.01)
    hog = Hog.remote()
    assert ray.get(hog.fill.remote(int(ray.cluster_resources()["object_store_memory"]))) > 0
    record_fault_time(run_dir)
    wait_until(lambda: (run_dir / "result.json").exists(), 0.1)
    ray.kill(hog)


def find_newest_shard(run_dir: Path) -> Path:
    """Return the largest file of the newest checkpoint."""
    return max(
        sorted((run_dir / "checkpoints").glob("step-*"))[-1].glob("*.safetensors"), key=lambda path: path.stat().st_size
    )


def flip_bit(run_dir: Path) -> None:
    """Flip one bit of the newest shard."""
    content = bytearray((shard := find_newest_shard(run_dir)).read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def truncate_shard(run_dir: Path) -> None:
    os.truncate(shard := find_newest_shard(run_dir), shard.stat().st_size // 2)


def delete_shard(run_dir: Path) -> None:
    find_newest_shard(run_dir).unlink()


def leave_unfinished(run_dir: Path) -> None:
    """Leave the newest checkpoint as a kill during its write does: without a manifest, and under the staging name."""
    newest = find_newest_shard(run_dir).parent
    (newest / "manifest.json").unlink()
    newest.rename(newest.with_name(f".staging-{newest.name}-g1"))


def kill_rank_of_second_generation(run_dir: Path) -> None:
    """Kill the first rank of the second generation, as soon as workers.json lists it."""
    wait_until(lambda: read_workers(run_dir)[0] == 2, 0.001)
    os.kill(read_workers(run_dir)[1][0], signal.SIGKILL)


def kill_all(run_dir: Path) -> None:
    wait_until(lambda: count_steps(run_dir) >= 10, 0.01)
    record_fault_time(run_dir)
    for pid in read_workers(run_dir)[1]:
        os.kill(pid, signal.SIGKILL)


def read_workers(run_dir: Path) -> tuple[int, list[int]]:
    """Return the current generation and the pids of its ranks."""
    path = run_dir / "workers.json"
    if not path.exists():
        return 0, []
    content = json.loads(path.read_text())
    return content["generation"], [worker["pid"] for worker in content["workers"]]


def count_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(condition: Callable[[], bool], interval_s: float, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(interval_s)


def record_fault_time(run_dir: Path) -> None:
    """Record the time of a fault inflicted from outside."""
    (run_dir / "injected").mkdir(exist_ok=True)
    (run_dir / "injected" / "outside").touch()
