"""What is done to a run from outside: to its processes, its directory, its disk, or the memory that it shares."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.loader.test_exactly_once import find_reader_processes
from tests.driver.loop_filesystem import Disk


def full_for_a_while(disk: Disk) -> None:
    disk.fill()
    time.sleep(3.0)
    disk.free()


def failing_for_a_while(disk: Disk) -> None:
    disk.fail()
    time.sleep(5.0)
    disk.mend()


def silent_for_a_minute(disk: Disk) -> None:
    disk.freeze(60.0)


def kill_readers(run_dir: Path) -> None:
    """The processes that read the dataset, three of them, as soon as there are any."""
    killed: set[int] = set()
    until(lambda: steps_of(run_dir) >= 10, 0.01)
    while len(killed) < 3:
        found = set(find_reader_processes()) - killed
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.02)
    stamp(run_dir)


def fill_object_store(run_dir: Path) -> None:
    """With objects that are in use, for as long as the run lasts."""
    import ray

    @ray.remote(num_cpus=0)
    class Hog:
        def fill(self, size: int) -> int:
            self.held = [ray.put(np.ones(size // 8, np.uint8)) for _ in range(8)]
            self.used = [ray.get(one) for one in self.held]
            return sum(one.nbytes for one in self.used)

    until(lambda: steps_of(run_dir) >= 10, 0.01)
    hog = Hog.remote()
    assert ray.get(hog.fill.remote(int(ray.cluster_resources()["object_store_memory"]))) > 0
    stamp(run_dir)
    until(lambda: (run_dir / "result.json").exists(), 0.1)
    ray.kill(hog)


def newest_shard(run_dir: Path) -> Path:
    """The largest file of the newest checkpoint."""
    return max(
        sorted((run_dir / "checkpoints").glob("step-*"))[-1].glob("*.safetensors"), key=lambda p: p.stat().st_size
    )


def flip(run_dir: Path) -> None:
    """A bit of it."""
    content = bytearray((shard := newest_shard(run_dir)).read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def cut_short(run_dir: Path) -> None:
    os.truncate(shard := newest_shard(run_dir), shard.stat().st_size // 2)


def delete(run_dir: Path) -> None:
    newest_shard(run_dir).unlink()


def leave_unfinished(run_dir: Path) -> None:
    """As a kill during the write does: what is written has no manifest and another name."""
    newest = newest_shard(run_dir).parent
    (newest / "manifest.json").unlink()
    newest.rename(newest.with_name(f".staging-{newest.name}-g1"))


def kill_one_of_the_next_generation(run_dir: Path) -> None:
    """As soon as the ranks of a second generation are known."""
    until(lambda: workers(run_dir)[0] == 2, 0.001)
    os.kill(workers(run_dir)[1][0], signal.SIGKILL)


def kill_all(run_dir: Path) -> None:
    until(lambda: steps_of(run_dir) >= 10, 0.01)
    stamp(run_dir)
    for pid in workers(run_dir)[1]:
        os.kill(pid, signal.SIGKILL)


def workers(run_dir: Path) -> tuple[int, list[int]]:
    """Generation and pids of the ranks now."""
    path = run_dir / "workers.json"
    if not path.exists():
        return 0, []
    content = json.loads(path.read_text())
    return content["generation"], [worker["pid"] for worker in content["workers"]]


def steps_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be growing."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def until(holds: Callable[[], bool], every_s: float, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(every_s)


def stamp(run_dir: Path) -> None:
    """The moment at which something is done to a run from outside."""
    (run_dir / "injected").mkdir(exist_ok=True)
    (run_dir / "injected" / "outside").touch()
