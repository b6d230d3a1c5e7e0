"""One run with or without a fault, and the cost of the fault according to the run directory."""

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
from tests.driver.external_faults import count_steps, read_workers, record_fault_time, wait_until
from tests.driver.loop_filesystem import Disk, mount_disk
from tests.driver.network_namespaces import NamespacedNodes
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.jobs.ray_head import Head
from tests.json_lines import read_json_lines
from tests.warm_pool import SMALL_OVERRIDES, make_small_config

STEPS = 80
WORDS = [
    "model.dropout=0.1",
    "train.micro_batch_size=1",
    "train.global_batch_size=12",
    "train.deterministic=elastic",
    "checkpoint.interval=20",
    "data.engine=local",
    "fault.max_failures=5",
]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    `expected`: (kind, rank) of each incident; of several ranks that die at once the lowest names the incident.
    `targets`: seconds to detection, and from there to the next step. `layout`: settings that also apply to the
    reference run. `grow`: numbers of workers to resize to. `between_runs`: a fault inflicted on the directory of a run
    that was stopped after step 45, before the run is started again. `component`: what fails besides single ranks: the
    second of two nodes (node: lost, network: cut off, freeze: frozen for twenty steps), the driver (started again),
    Ray's head, or the driver of a job (submitted again). `disk_fault`: the fault of the disk under the run.
    `reference_words`: settings of the reference run alone. `is_invisible`: no incident is expected. `fault_step`: steps
    before an external fault.
    """

    name: str
    expected: tuple[tuple[str, int], ...]
    targets: tuple[float, float] | None
    inject: tuple[tuple[str, int, int], ...] = ()  # kind, rank, step
    workers: int = 3
    words: tuple[str, ...] = ()
    external: Callable[[Path], None] | None = None
    steps: int = STEPS
    layout: tuple[str, ...] = ()
    grow: tuple[int, ...] = ()
    between_runs: Callable[[Path], None] | None = None
    component: Literal["", "node", "network", "freeze", "driver", "head", "job"] = ""
    disk_fault: Callable[[Disk], None] | None = None
    reference_words: tuple[str, ...] = ()
    is_invisible: bool = False
    fault_step: int = 30

    def settings(self, *, with_fault: bool) -> list[str]:
        """Return the settings of the run with the fault, or of the reference run."""
        own = list(self.layout) + [
            f"train.steps={self.steps}",
            f"cluster.workers={self.workers if self.component else 3}",
        ]
        if not with_fault:
            return [*WORDS, *own, *self.reference_words]
        faults = ", ".join(f"{{kind: {kind}, rank: {rank}, step: {step}}}" for kind, rank, step in self.inject)
        return [*WORDS, *own, f"cluster.workers={self.workers}", f"fault.inject=[{faults}]", *self.words]


@dataclass
class Cost:
    """The cost of a fault: seconds to detection, and from there to the next step; steps that were run again."""

    detected_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    steps_lost: int = 0
    same_bits: bool = True


def train(fault: Fault, run_dir: Path, *, with_fault: bool) -> str:
    """Run in the Ray to which this process is connected; return a hash of the losses and the last state."""
    if with_fault and fault.between_runs:
        first = rt.start(make_small_config(run_dir, *fault.settings(with_fault=True)))
        wait_until(lambda: count_steps(run_dir) >= 45, 0.01)
        first.stop()
        assert first.result(timeout=120).outcome == "stopped"
        fault.between_runs(run_dir)
        record_fault_time(run_dir)
    handle = rt.start(make_small_config(run_dir, *fault.settings(with_fault=with_fault)))
    if with_fault and fault.external:
        threading.Thread(target=fault.external, args=(run_dir,), daemon=True).start()
    for world in fault.grow if with_fault else ():
        grow(run_dir, handle, world)
    result = handle.result(timeout=280)
    assert (result.outcome, result.steps) == ("done", fault.steps)
    return fingerprint(run_dir)


def train_on_disk(fault: Fault, run_dir: Path, *, with_fault: bool) -> str:
    """Run `train` on a disk of its own, which fails after ten steps."""
    if not with_fault or fault.disk_fault is None:
        return train(fault, run_dir, with_fault=with_fault)
    with mount_disk(run_dir.with_name(f"{run_dir.name}-disk")) as disk:
        disk_run_dir, inflict = disk.path / "run", fault.disk_fault

        def inflict_later() -> None:
            wait_until(lambda: count_steps(disk_run_dir) >= 10, 0.01)
            inflict(disk)

        threading.Thread(target=inflict_later, daemon=True).start()
        train(fault, disk_run_dir, with_fault=True)
        shutil.copytree(disk_run_dir, run_dir)
    return fingerprint(run_dir)


def grow(run_dir: Path, handle: rt.Run, workers: int) -> None:
    """Request more workers and wait until they train."""
    wait_until(lambda: count_steps(run_dir) >= 10, 0.01)
    handle.resize(workers)
    wait_until(lambda: read_json_lines(run_dir / "metrics.jsonl")[-1]["elastic/world_size"] == workers, 0.05)


def train_on_two_nodes(
    cluster: TwoNodeCluster | NamespacedNodes, fault: Fault, run_dir: Path, *, with_fault: bool
) -> str:
    """Run in a process on the first of two nodes, and inflict the fault on the component."""
    words = [*SMALL_OVERRIDES, *fault.settings(with_fault=with_fault)]
    command = cluster.on_first_node(sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *words)
    process = _start(command, cluster, run_dir)
    try:
        if with_fault:
            wait_until(lambda: count_steps(run_dir) >= fault.fault_step or process.poll() is not None, 0.01)
            record_fault_time(run_dir)
            if fault.component == "driver":
                process.kill()
                process.communicate()
                process = _start(command, cluster, run_dir)
            elif fault.component == "head":
                assert isinstance(cluster, TwoNodeCluster)
                cluster.send("behead")
            elif fault.component == "freeze":
                assert isinstance(cluster, TwoNodeCluster)
                write_lost_ranks(run_dir, cluster.fail_second_node(read_ranks(run_dir), "freeze"))
                wait_until(lambda: read_workers(run_dir)[0] == 2, 0.01)
                resume_step = count_steps(run_dir)
                wait_until(lambda: count_steps(run_dir) >= resume_step + 20, 0.01)
                cluster.send("thaw")
            else:
                write_lost_ranks(run_dir, cluster.fail_second_node(read_ranks(run_dir)))
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()
        if with_fault and fault.component == "freeze":
            cluster.send("lose")
        if with_fault and fault.component in ("node", "network", "freeze"):
            cluster.restore()
    return fingerprint(run_dir)


def train_as_job(head: Head, fault: Fault, run_dir: Path, *, with_fault: bool) -> str:
    """Run a submitted job, kill its driver, and submit the job again."""
    words = [f"run.dir={run_dir}", *SMALL_OVERRIDES, *fault.settings(with_fault=with_fault)]
    names = [run_dir.name, f"{run_dir.name}-again"][: 2 if with_fault else 1]
    for name in names:
        head.submit(name, *words, wait=False)
        if name != names[-1]:
            wait_until(lambda: count_steps(run_dir) >= fault.fault_step, 0.01)
            record_fault_time(run_dir)
            for process in head.process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if f"run.dir={run_dir}" in process.cmdline():
                        process.kill()
    wait_until(lambda: head.status(names[-1]) not in ("PENDING", "RUNNING"), 0.2)
    assert head.status(names[-1]) == "SUCCEEDED", head.logs(names[-1])
    return fingerprint(run_dir)


def read_ranks(run_dir: Path) -> list[dict[str, Any]]:
    """Return the entries of workers.json."""
    workers: list[dict[str, Any]] = json.loads((run_dir / "workers.json").read_text())["workers"]
    return workers


def write_lost_ranks(run_dir: Path, lost: list[int]) -> None:
    (run_dir / "lost.json").write_text(json.dumps(lost))


def _start(command: list[str], cluster: TwoNodeCluster | NamespacedNodes, run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=cluster.env, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def measure_cost(fault: Fault, run_dir: Path) -> tuple[list[float], list[float], int]:
    """Check that the right ranks are named; return detection times, recovery times and the number of lost steps."""
    metrics = read_json_lines(run_dir / "metrics.jsonl")
    fault_times = [mark.stat().st_mtime for mark in sorted((run_dir / "injected").glob("*"))]
    if (
        fault.grow
        or fault.between_runs
        or fault.disk_fault
        or fault.is_invisible
        or fault.component in ("driver", "head", "job")
    ):
        assert not (incident_file := run_dir / "incidents.jsonl").exists(), incident_file.read_text()
        later_times = [line["time/unix"] for line in metrics if fault_times and line["time/unix"] > fault_times[0]]
        pause = max(measure_pauses(metrics)) if fault.grow else measure_longest_pause(metrics)
        assert fault_times or not fault.is_invisible
        was_restarted = fault.between_runs or fault.component in ("driver", "job")
        repeated_steps = len(metrics) - fault.steps
        assert repeated_steps <= get_checkpoint_interval(run_dir), f"{repeated_steps} steps run again"
        return [], [min(later_times) - fault_times[0] if was_restarted else pause], repeated_steps
    incidents = read_json_lines(run_dir / "incidents.jsonl")
    attributed = tuple((incident["kind"], incident["rank"]) for incident in incidents)
    if fault.component:
        lost_ranks = json.loads((run_dir / "lost.json").read_text())
        kinds = ("died", "node lost") if fault.component == "node" else ("node lost",)  # Ray may report it first
        assert lost_ranks and len(attributed) == 1 and incidents[0]["ranks"] == lost_ranks, incidents
        assert attributed[0][0] in kinds and attributed[0][1] == lost_ranks[0], incidents
    else:
        assert attributed == fault.expected, incidents
    killed = sorted({rank for kind, rank, _ in fault.inject if kind == "kill"})
    assert not killed or incidents[0]["ranks"] == killed
    detected = [max(0.0, incidents[0]["time"] - min(fault_times))] if fault_times else []
    later_times = [line["time/unix"] for line in metrics if line["time/unix"] > incidents[-1]["time"]]
    return (
        detected,
        [min(later_times) - incidents[-1]["time"]],
        sum(incident["steps_lost"] or 0 for incident in incidents),
    )


def get_checkpoint_interval(run_dir: Path) -> int:
    """Return the number of steps between two checkpoints of a run."""
    interval: int = OmegaConf.load(run_dir / "config.yaml").checkpoint.interval
    return interval


def measure_pauses(metrics: list[dict[str, Any]]) -> list[float]:
    """Return the seconds by which the first step of each later generation exceeds a usual step."""
    usual = median(line["time/step_s"] for line in metrics)
    return [
        line["time/unix"] - previous["time/unix"] - usual
        for previous, line in zip(metrics, metrics[1:], strict=False)
        if line["elastic/generation"] != previous["elastic/generation"]
    ]


def measure_longest_pause(metrics: list[dict[str, Any]]) -> float:
    """Return the largest number of seconds between two steps."""
    return max(line["time/unix"] - previous["time/unix"] for previous, line in zip(metrics, metrics[1:], strict=False))
