"""One run with a fault, or without, and what its directory says of what that cost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import raytrain_hpc as rt
from raytrain_hpc.drill import fingerprint
from tests.driver.apart import Apart
from tests.driver.disks import Disk, mounted
from tests.driver.two_nodes import TwoNodes
from tests.pool import SMALL, small

STEPS = 80
WORDS = [
    "model.dropout=0.1",
    "train.micro_batch=1",
    "train.global_batch=12",
    "train.deterministic=elastic",
    "checkpoint.every=20",
    "data.engine=local",
    "fault.max_failures=5",
]


@dataclass(frozen=True)
class Fault:
    """A row. `expected`: (kind, rank) of each incident; `targets`: seconds to detection, and from there to a step.

    Of several that die at once the lowest rank names the incident, and all are in it. `layout`: settings of the run it
    is compared with, too. `grow`: how many workers are asked for, one after the other. `between`: what is done to the
    directory of a run that was stopped after step 45, before the same run is started again. `struck`: what of two nodes
    is: the second is lost, or the network to it cut; the driver is killed and started again; or Ray's head is. `disk`:
    what becomes of the disk under the run. `like`: settings of the run that it is compared with, and not its own.
    """

    name: str
    expected: tuple[tuple[str, int], ...]
    targets: tuple[float, float]
    inject: tuple[tuple[str, int, int], ...] = ()  # kind, rank, step
    workers: int = 3
    words: tuple[str, ...] = ()
    outside: Callable[[Path], None] | None = None
    steps: int = STEPS
    layout: tuple[str, ...] = ()
    grow: tuple[int, ...] = ()
    between: Callable[[Path], None] | None = None
    struck: Literal["", "node", "network", "driver", "head"] = ""
    disk: Callable[[Disk], None] | None = None
    like: tuple[str, ...] = ()

    def settings(self, *, disturbed: bool) -> list[str]:
        """The words of a run with the fault, or of the one that it is compared with."""
        own = list(self.layout) + [f"train.steps={self.steps}", f"cluster.workers={self.workers if self.struck else 3}"]
        if not disturbed:
            return [*WORDS, *own, *self.like]
        faults = ", ".join(f"{{kind: {kind}, rank: {rank}, step: {step}}}" for kind, rank, step in self.inject)
        return [*WORDS, *own, f"cluster.workers={self.workers}", f"fault.inject=[{faults}]", *self.words]


@dataclass
class Cost:
    """What a row cost: seconds from the fault to its detection, from there to the next step; steps run again."""

    detected_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    steps_lost: int = 0
    same: bool = True


def train(fault: Fault, run_dir: Path, *, disturbed: bool) -> str:
    """A run in the Ray that this process is connected to. Returns the hash of losses and last state."""
    if disturbed and fault.between:
        first = rt.start(small(run_dir, *fault.settings(disturbed=True)))
        until(lambda: steps_of(run_dir) >= 45, 0.01)
        first.stop()
        assert first.result(timeout=120).outcome == "stopped"
        fault.between(run_dir)
        stamp(run_dir)
    handle = rt.start(small(run_dir, *fault.settings(disturbed=disturbed)))
    if disturbed and fault.outside:
        threading.Thread(target=fault.outside, args=(run_dir,), daemon=True).start()
    for workers in fault.grow if disturbed else ():
        grow(run_dir, handle, workers)
    result = handle.result(timeout=280)
    assert (result.outcome, result.steps) == ("done", fault.steps)
    return fingerprint(run_dir)


def train_on_a_disk(fault: Fault, run_dir: Path, *, disturbed: bool) -> str:
    """As `train`, on a disk of its own, of which something becomes after ten steps."""
    if not disturbed or fault.disk is None:
        return train(fault, run_dir, disturbed=disturbed)
    with mounted(run_dir.with_name(f"{run_dir.name}-disk")) as disk:
        there, act = disk.path / "run", fault.disk

        def strike() -> None:
            until(lambda: steps_of(there) >= 10, 0.01)
            act(disk)

        threading.Thread(target=strike, daemon=True).start()
        train(fault, there, disturbed=True)
        shutil.copytree(there, run_dir)
    return fingerprint(run_dir)


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


def grow(run_dir: Path, handle: rt.Run, workers: int) -> None:
    """Ask for more workers, and wait for them."""
    until(lambda: steps_of(run_dir) >= 10, 0.01)
    handle.resize(workers)
    until(lambda: lines(run_dir / "metrics.jsonl")[-1]["elastic/world_size"] == workers, 0.05)


def train_on(cluster: TwoNodes | Apart, fault: Fault, run_dir: Path, *, disturbed: bool) -> str:
    """A run in a process of its own on the first of two nodes, and what is to be struck of all this."""
    words = [*SMALL, *fault.settings(disturbed=disturbed)]
    command = cluster.inside(sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *words)
    process = _started(command, cluster, run_dir)
    try:
        if disturbed:
            until(lambda: steps_of(run_dir) >= 30 or process.poll() is not None, 0.01)
            stamp(run_dir)
            if fault.struck == "driver":
                process.kill()
                process.communicate()
                process = _started(command, cluster, run_dir)
            elif fault.struck == "head":
                assert isinstance(cluster, TwoNodes)
                cluster.tell("behead")
            else:
                there = json.loads((run_dir / "workers.json").read_text())["workers"]
                (run_dir / "lost.json").write_text(json.dumps(cluster.strike(there)))
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()
        if disturbed and fault.struck in ("node", "network"):
            cluster.restore()
    return fingerprint(run_dir)


def _started(command: list[str], cluster: TwoNodes | Apart, run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=cluster.env, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def cost(fault: Fault, run_dir: Path) -> tuple[list[float], list[float], int]:
    """Detection and recovery of each incident, and steps lost, having checked that the right rank is named."""
    metrics = lines(run_dir / "metrics.jsonl")
    struck = [mark.stat().st_mtime for mark in sorted((run_dir / "injected").glob("*"))]
    if fault.grow or fault.between or fault.disk or fault.struck in ("driver", "head"):
        assert not (run_dir / "incidents.jsonl").exists()
        after = [line["time/unix"] for line in metrics if struck and line["time/unix"] > struck[0]]
        paused = max(pauses(metrics)) if fault.grow else longest(metrics)
        begun_again = fault.between or fault.struck == "driver"
        return [], [min(after) - struck[0] if begun_again else paused], len(metrics) - fault.steps
    incidents = lines(run_dir / "incidents.jsonl")
    named = tuple((one["kind"], one["rank"]) for one in incidents)
    if fault.struck:
        lost = json.loads((run_dir / "lost.json").read_text())
        kinds = {"node": ("died", "node lost"), "network": ("node lost",)}[
            fault.struck
        ]  # Ray may be the first to say so
        assert lost and len(named) == 1 and incidents[0]["ranks"] == lost, incidents
        assert named[0][0] in kinds and named[0][1] == lost[0], incidents
    else:
        assert named == fault.expected, incidents
    killed = sorted({rank for kind, rank, _ in fault.inject if kind == "kill"})
    assert not killed or incidents[0]["ranks"] == killed
    detected = [max(0.0, incidents[0]["time"] - min(struck))] if struck else []
    after = [line["time/unix"] for line in metrics if line["time/unix"] > incidents[-1]["time"]]
    return detected, [min(after) - incidents[-1]["time"]], sum(one["steps_lost"] or 0 for one in incidents)


def pauses(metrics: list[dict[str, Any]]) -> list[float]:
    """Seconds by which the first step of each further generation came later than a step does."""
    usual = median(line["time/step_s"] for line in metrics)
    return [
        line["time/unix"] - before["time/unix"] - usual
        for before, line in zip(metrics, metrics[1:], strict=False)
        if line["elastic/generation"] != before["elastic/generation"]
    ]


def longest(metrics: list[dict[str, Any]]) -> float:
    """Seconds between two steps, at most."""
    return max(line["time/unix"] - before["time/unix"] for before, line in zip(metrics, metrics[1:], strict=False))


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
