"""The whole driver over thousands of ranks that are not there: what it plans, sends, remembers, and how long it takes.

python -m tests.driver.dry_run [RANKS ...]

Ray is played by `tests.driver.fake_ray`; everything else is what a run has. One rank is lost on the way.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.driver import supervisor
from raytrain_hpc.driver.ray_backend import RayWorkerGroup
from raytrain_hpc.driver.supervisor import Supervisor
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.observability.console import Console
from raytrain_hpc.planner.topology import Node, Topology
from tests.driver.fake_ray import Play, Stage

A_NODE = 8
RANKS = (256, 512, 1024, 2048, 4096)


class NoStore:
    """Where nobody meets."""

    def abort_generation(self, generation: int) -> None:
        pass

    def create_rendezvous(self, generation: int) -> Rendezvous:
        return Rendezvous("127.0.0.1", 0, generation, 60.0)


@dataclass
class DryRunBackend:
    """Nodes of eight, and one more for spares."""

    world: int
    cluster: Topology
    stage: Stage
    is_external: bool = False

    def create_worker_group(self, config: Config) -> RayWorkerGroup:
        actors = ActorPool(config, self.world + config.cluster.spares, self.cluster, self.stage.workers)
        return RayWorkerGroup(config, actors, NoStore(), use_ray_readers=False)  # type: ignore[arg-type]


def settings(ranks: int, directory: str) -> Config:
    """Tensor parallel in a node, four stages, the optimizer sharded over the rest: whoever is lost held state alone."""
    return load_config(
        None,
        [
            *("model.preset=llama3_8b", "data.path=synthetic", "train.seq_len=4096", "train.dtype=bf16"),
            *(f"train.global_batch={ranks // 2}", "train.micro_batch=1", "train.steps=20", "train.warmup=2"),
            *(f"cluster.workers={ranks}", f"cluster.spares={A_NODE}", "cluster.device=cuda"),
            *("parallel.tp=8", "parallel.pp=4", "parallel.zero=1", "parallel.dp_shard=auto", "parallel.recompute=full"),
            *(f"run.dir={directory}", "observe.tensorboard=false", "observe.sample_tokens=0"),
        ],
    )


def dry_run(ranks: int, play: Play) -> dict[str, Any]:
    """One run of the driver. Returns what it took, and where it put the ranks."""
    nodes = tuple(Node(f"node-{n:04}", f"10.0.{n // 256}.{n % 256}", A_NODE) for n in range(ranks // A_NODE + 1))
    cluster = Topology(nodes, "cuda", "h100")
    with tempfile.TemporaryDirectory() as directory, Stage(cluster, play) as stage:
        fleet = DryRunBackend(ranks, cluster, stage)

        @contextmanager
        def opened(config: Config) -> Iterator[DryRunBackend]:
            yield fleet

        before, began, cpu = peak_mib(), time.monotonic(), time.process_time()
        with mock.patch.object(supervisor, "open_backend", opened):
            result = Supervisor(settings(ranks, f"{directory}/run"), None, Console(quiet=True), threading.Event()).run()
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        lines = Path(directory, "run", "incidents.jsonl").read_text().splitlines()
    return {
        "ranks": ranks,
        "outcome": result.outcome,
        "steps": result.steps,
        "incidents": [json.loads(line) for line in lines],
        "placed": stage.placed,
        "formed_s": stage.launched[0] - began,
        "again_s": stage.launched[1] - stage.struck if len(stage.launched) > 1 else None,
        "driver_cpu_share": (cpu - stage.own_cpu_s) / seconds,
        "messages": dict(stage.messages),
        "messages_per_s": stage.steady_messages / stage.steady_s if stage.steady_s else 0.0,
        "sent_mib": stage.sent_bytes / 2**20,
        "memory_mib": peak_mib() - before,
        "seconds": seconds,
    }


def peak_mib() -> float:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main(sizes: Sequence[int]) -> None:
    """Every size in a process of its own, and a table."""
    print("| ranks | planned and formed s | formed again s | messages a second | driver CPU % | MiB more |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ranks in sizes:
        code = "import json; from tests.driver.dry_run import dry_run, Play"
        code += f"; found = dry_run({ranks}, Play()); found.pop('placed'); print(json.dumps(found))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=1200)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {ranks} | {found['formed_s']:.2f} | {found['again_s']:.2f} | {found['messages_per_s']:.0f} "
            f"| {100 * found['driver_cpu_share']:.0f} | {found['memory_mib']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or RANKS)
