"""Dry run of the whole driver over thousands of simulated ranks: its plan, messages, memory and time.

python -m tests.driver.dry_run [RANKS ...]

`tests.driver.fake_ray` replaces Ray; everything else is as in a run. One rank is lost on the way.
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
from tests.driver.fake_ray import FakeRay, Scenario

RANKS_PER_NODE = 8
RANKS = (256, 512, 1024, 2048, 4096)


class FakeRendezvousStore:
    """A rendezvous store that no rank uses."""

    def abort_generation(self, generation: int) -> None:
        pass

    def create_rendezvous(self, generation: int) -> Rendezvous:
        return Rendezvous("127.0.0.1", 0, generation, 60.0)


@dataclass
class DryRunBackend:
    """A backend of nodes with eight ranks, and one more node for spares."""

    world_size: int
    cluster: Topology
    fake_ray: FakeRay
    follows_cluster: bool = False
    uses_existing_cluster: bool = False

    def create_worker_group(self, config: Config) -> RayWorkerGroup:
        actors = ActorPool(config, self.world_size + config.cluster.spares, self.cluster, self.fake_ray.workers)
        return RayWorkerGroup(config, actors, FakeRendezvousStore(), ray_readers=False)  # type: ignore[arg-type]


def dry_run_config(ranks: int, directory: str) -> Config:
    """Return settings under which no two ranks hold the same state: tp per node, pp=4, and a sharded optimizer."""
    return load_config(
        None,
        [
            *("model.preset=llama3_8b", "data.path=synthetic", "train.seq_len=4096", "train.dtype=bf16"),
            *(
                f"train.global_batch_size={ranks // 2}",
                "train.micro_batch_size=1",
                "train.steps=20",
                "lr_scheduler.warmup_steps=2",
            ),
            *(f"cluster.workers={ranks}", f"cluster.spares={RANKS_PER_NODE}", "cluster.device=cuda"),
            *(
                "parallel.tp=8",
                "parallel.pp=4",
                "parallel.zero=1",
                "parallel.dp_shard=auto",
                "parallel.activation_checkpointing=full",
            ),
            *(f"run.dir={directory}", "logging.tensorboard=false", "logging.sample_tokens=0"),
        ],
    )


def dry_run(ranks: int, scenario: Scenario) -> dict[str, Any]:
    """Run the driver once; return its measurements, and the nodes of all ranks."""
    nodes = tuple(
        Node(f"node-{n:04}", f"10.0.{n // 256}.{n % 256}", RANKS_PER_NODE) for n in range(ranks // RANKS_PER_NODE + 1)
    )
    cluster = Topology(nodes, "cuda", "h100")
    with tempfile.TemporaryDirectory() as directory, FakeRay(cluster, scenario) as fake_ray:
        backend = DryRunBackend(ranks, cluster, fake_ray)

        @contextmanager
        def open_fake_backend(config: Config, *arguments: Any) -> Iterator[DryRunBackend]:
            yield backend

        memory_before, start, cpu = peak_mib(), time.monotonic(), time.process_time()
        with mock.patch.object(supervisor, "open_backend", open_fake_backend):
            result = Supervisor(
                dry_run_config(ranks, f"{directory}/run"), None, Console(quiet=True), threading.Event()
            ).run()
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        lines = Path(directory, "run", "incidents.jsonl").read_text().splitlines()
    return {
        "ranks": ranks,
        "outcome": result.outcome,
        "steps": result.steps,
        "incidents": [json.loads(line) for line in lines],
        "node_of_rank": fake_ray.node_of_rank,
        "start_s": fake_ray.launch_times[0] - start,
        "recovery_s": fake_ray.launch_times[1] - fake_ray.lost_at if len(fake_ray.launch_times) > 1 else None,
        "driver_cpu_share": (cpu - fake_ray.fake_cpu_s) / seconds,
        "messages": dict(fake_ray.messages),
        "messages_per_s": fake_ray.steady_messages / fake_ray.steady_s if fake_ray.steady_s else 0.0,
        "sent_mib": fake_ray.sent_bytes / 2**20,
        "memory_mib": peak_mib() - memory_before,
        "seconds": seconds,
    }


def peak_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main(sizes: Sequence[int]) -> None:
    """Run each size in a process of its own, and print a table."""
    print("| ranks | start s | recovery s | messages per second | driver CPU % | added MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ranks in sizes:
        code = "import json; from tests.driver.dry_run import dry_run, Scenario"
        code += f"; result = dry_run({ranks}, Scenario()); result.pop('node_of_rank'); print(json.dumps(result))"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=1200)
        measurements = json.loads(process.stdout.splitlines()[-1])
        print(
            f"| {ranks} | {measurements['start_s']:.2f} | {measurements['recovery_s']:.2f} "
            f"| {measurements['messages_per_s']:.0f} | {100 * measurements['driver_cpu_share']:.0f} "
            f"| {measurements['memory_mib']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or RANKS)
