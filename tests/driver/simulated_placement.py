"""Workers placed on a simulated cluster as those of a run are.

As a script: the Python with which workers are started; then pairs of arguments, the nodes to add as
SLOTS:RACK,SLOTS:RACK and JSON of the settings to place on them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.cluster_utils import Cluster

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.ray_topology import read_topology
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.elastic.recovery import Candidate, plan_membership
from raytrain_hpc.planner.comm_volume import compute_bytes_by_axis
from raytrain_hpc.planner.layout import resolve_batching, resolve_layout
from raytrain_hpc.planner.workload import make_workload
from tests.driver.two_node_cluster import LEAN_HEAD
from tests.warm_ray_workers import use_python


@ray.remote
class FakeWorkerActor:
    """An actor that reports where it is and trains nothing."""

    def __init__(self, device: str, threads: int):
        pass

    def describe(self, config: Config, spec: None) -> dict[str, Any]:
        context = ray.get_runtime_context()
        rack = context.get_node_labels().get(config.cluster.rack_label, "")
        return {"node_id": context.get_node_id(), "rack": rack, "host": "h", "pid": os.getpid()}


def place(config: Config) -> dict[str, Any]:
    """Return where each rank of a first generation is: its planned coordinates, and the node that Ray reports."""
    cluster = read_topology(config)
    world = int(config.cluster.workers)
    batching = resolve_batching(config, resolve_layout(config, world))
    work = make_workload(config, resolve_model_spec(config.model, vocab_size=64, seq_len=config.train.seq_len))
    pool = ActorPool(config, world + config.cluster.spares, cluster, FakeWorkerActor)
    try:
        pool.start()
        candidates = [
            Candidate(worker.worker_id, worker.info["node_id"], worker.info["pid"], rack=worker.info["rack"])
            for worker in pool.ready
        ]
        formation = plan_membership(
            config,
            batching,
            candidates,
            world,
            lambda layout, batch_split: compute_bytes_by_axis(work, layout, batch_split),
        )
        assert formation is not None
        info_of_worker = {worker.worker_id: worker.info for worker in pool.ready}
        spares = [info["node_id"] for worker_id, info in info_of_worker.items() if worker_id not in formation.members]
        members = [info_of_worker[worker_id] for worker_id in formation.members]
    finally:
        pool.close()
    coordinates = [formation.layout.get_coordinates(rank) for rank in range(world)]
    ranks = [{**info, "at": rank_coordinates} for info, rank_coordinates in zip(members, coordinates, strict=True)]
    slots = {node.id: node.slots for node in cluster.nodes}
    return {"ranks": ranks, "spares": spares, "slots": slots, "racks": {node.id: node.rack for node in cluster.nodes}}


def main(python: str, words: Sequence[str]) -> None:
    cluster, placements = Cluster(), []
    try:
        for nodes, runs in zip(words[::2], words[1::2], strict=True):
            for slots, rack in (node.split(":") for node in nodes.split(",")):
                with use_python(python):
                    cluster.add_node(num_cpus=int(slots), labels={"rack": rack} if rack else {}, **LEAN_HEAD)
            cluster.wait_for_nodes(timeout=60)
            ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)
            placements += [place(load_config(None, run)) for run in json.loads(runs)]
        print(json.dumps(placements))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
