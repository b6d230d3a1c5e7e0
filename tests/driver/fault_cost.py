"""One run with a fault, or without, and what its directory says of what that cost."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
from omegaconf import OmegaConf

import raytrain_hpc as rt
from raytrain_hpc.cli.drill import fingerprint
from tests.driver.external_faults import lines, stamp, steps_of, until, workers
from tests.driver.loop_filesystem import Disk, mounted
from tests.driver.network_namespaces import Apart
from tests.driver.two_node_cluster import TwoNodes
from tests.jobs.ray_head import Head
from tests.warm_pool import SMALL_OVERRIDES, make_small_config

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
    is: the second is lost, the network to it cut, or all on it frozen for as long as twenty steps take; the driver is
    killed and started again; Ray's head is; or the job is submitted again after its driver was killed. `disk`: what
    becomes of the disk under the run. `like`: settings of the run that it is compared with, and not its own.
    `unseen`: no incident is to come of it. `after`: how many steps of a run are seen before it is struck from outside.
    """

    name: str
    expected: tuple[tuple[str, int], ...]
    targets: tuple[float, float] | None
    inject: tuple[tuple[str, int, int], ...] = ()  # kind, rank, step
    workers: int = 3
    words: tuple[str, ...] = ()
    outside: Callable[[Path], None] | None = None
    steps: int = STEPS
    layout: tuple[str, ...] = ()
    grow: tuple[int, ...] = ()
    between: Callable[[Path], None] | None = None
    struck: Literal["", "node", "network", "freeze", "driver", "head", "job"] = ""
    disk: Callable[[Disk], None] | None = None
    like: tuple[str, ...] = ()
    unseen: bool = False
    after: int = 30

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
        first = rt.start(make_small_config(run_dir, *fault.settings(disturbed=True)))
        until(lambda: steps_of(run_dir) >= 45, 0.01)
        first.stop()
        assert first.result(timeout=120).outcome == "stopped"
        fault.between(run_dir)
        stamp(run_dir)
    handle = rt.start(make_small_config(run_dir, *fault.settings(disturbed=disturbed)))
    if disturbed and fault.outside:
        threading.Thread(target=fault.outside, args=(run_dir,), daemon=True).start()
    for world in fault.grow if disturbed else ():
        grow(run_dir, handle, world)
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


def grow(run_dir: Path, handle: rt.Run, workers: int) -> None:
    """Ask for more workers, and wait for them."""
    until(lambda: steps_of(run_dir) >= 10, 0.01)
    handle.resize(workers)
    until(lambda: lines(run_dir / "metrics.jsonl")[-1]["elastic/world_size"] == workers, 0.05)


def train_on(cluster: TwoNodes | Apart, fault: Fault, run_dir: Path, *, disturbed: bool) -> str:
    """A run in a process of its own on the first of two nodes, and what is to be struck of all this."""
    words = [*SMALL_OVERRIDES, *fault.settings(disturbed=disturbed)]
    command = cluster.inside(sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *words)
    process = _started(command, cluster, run_dir)
    try:
        if disturbed:
            until(lambda: steps_of(run_dir) >= fault.after or process.poll() is not None, 0.01)
            stamp(run_dir)
            if fault.struck == "driver":
                process.kill()
                process.communicate()
                process = _started(command, cluster, run_dir)
            elif fault.struck == "head":
                assert isinstance(cluster, TwoNodes)
                cluster.tell("behead")
            elif fault.struck == "freeze":
                assert isinstance(cluster, TwoNodes)
                note_lost(run_dir, cluster.strike(ranks(run_dir), "freeze"))
                until(lambda: workers(run_dir)[0] == 2, 0.01)
                after = steps_of(run_dir)
                until(lambda: steps_of(run_dir) >= after + 20, 0.01)
                cluster.tell("thaw")
            else:
                note_lost(run_dir, cluster.strike(ranks(run_dir)))
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()
        if disturbed and fault.struck == "freeze":
            cluster.tell("lose")
        if disturbed and fault.struck in ("node", "network", "freeze"):
            cluster.restore()
    return fingerprint(run_dir)


def train_as_job(head: Head, fault: Fault, run_dir: Path, *, disturbed: bool) -> str:
    """A submitted job, whose driver is killed, and the same submitted again."""
    words = [f"run.dir={run_dir}", *SMALL_OVERRIDES, *fault.settings(disturbed=disturbed)]
    names = [run_dir.name, f"{run_dir.name}-again"][: 2 if disturbed else 1]
    for name in names:
        head.submit(name, *words, wait=False)
        if name != names[-1]:
            until(lambda: steps_of(run_dir) >= fault.after, 0.01)
            stamp(run_dir)
            for one in head.process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if f"run.dir={run_dir}" in one.cmdline():
                        one.kill()
    until(lambda: head.status(names[-1]) not in ("PENDING", "RUNNING"), 0.2)
    assert head.status(names[-1]) == "SUCCEEDED", head.logs(names[-1])
    return fingerprint(run_dir)


def ranks(run_dir: Path) -> list[dict[str, Any]]:
    """What workers.json says of each."""
    there: list[dict[str, Any]] = json.loads((run_dir / "workers.json").read_text())["workers"]
    return there


def note_lost(run_dir: Path, lost: list[int]) -> None:
    (run_dir / "lost.json").write_text(json.dumps(lost))


def _started(command: list[str], cluster: TwoNodes | Apart, run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=cluster.env, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def cost(fault: Fault, run_dir: Path) -> tuple[list[float], list[float], int]:
    """Detection and recovery of each incident, and steps lost, having checked that the right rank is named."""
    metrics = lines(run_dir / "metrics.jsonl")
    struck = [mark.stat().st_mtime for mark in sorted((run_dir / "injected").glob("*"))]
    if fault.grow or fault.between or fault.disk or fault.unseen or fault.struck in ("driver", "head", "job"):
        assert not (said := run_dir / "incidents.jsonl").exists(), said.read_text()
        after = [line["time/unix"] for line in metrics if struck and line["time/unix"] > struck[0]]
        paused = max(pauses(metrics)) if fault.grow else longest(metrics)
        assert struck or not fault.unseen
        begun_again = fault.between or fault.struck in ("driver", "job")
        again = len(metrics) - fault.steps
        assert again <= interval(run_dir), f"{again} steps run again"
        return [], [min(after) - struck[0] if begun_again else paused], again
    incidents = lines(run_dir / "incidents.jsonl")
    named = tuple((one["kind"], one["rank"]) for one in incidents)
    if fault.struck:
        lost = json.loads((run_dir / "lost.json").read_text())
        kinds = ("died", "node lost") if fault.struck == "node" else ("node lost",)  # Ray may be the first to say so
        assert lost and len(named) == 1 and incidents[0]["ranks"] == lost, incidents
        assert named[0][0] in kinds and named[0][1] == lost[0], incidents
    else:
        assert named == fault.expected, incidents
    killed = sorted({rank for kind, rank, _ in fault.inject if kind == "kill"})
    assert not killed or incidents[0]["ranks"] == killed
    detected = [max(0.0, incidents[0]["time"] - min(struck))] if struck else []
    after = [line["time/unix"] for line in metrics if line["time/unix"] > incidents[-1]["time"]]
    return detected, [min(after) - incidents[-1]["time"]], sum(one["steps_lost"] or 0 for one in incidents)


def interval(run_dir: Path) -> int:
    """Steps between two checkpoints of a run."""
    every: int = OmegaConf.load(run_dir / "config.yaml").checkpoint.every
    return every


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
