"""Workers on a simulated cluster, placed as a run's are.

As a script: pairs of nodes to add, as SLOTS:RACK,SLOTS:RACK, and JSON of the settings to place on what is there then.
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


@ray.remote
class Stand:
    """In a worker's place: says where it is, and trains nothing."""

    def __init__(self, device: str, threads: int):
        pass

    def describe(self, config: Config, spec: None) -> dict[str, Any]:
        context = ray.get_runtime_context()
        rack = context.get_node_labels().get(config.cluster.rack_label, "")
        return {"node": context.get_node_id(), "rack": rack, "pid": os.getpid()}


def placed(config: Config) -> dict[str, Any]:
    """Where each rank of a first generation would be, by what is planned and by what Ray says of the processes."""
    cluster = read_topology(config)
    world = int(config.cluster.workers)
    batching = resolve_batching(config, resolve_layout(config, world))
    work = make_workload(config, resolve_model_spec(config.model, vocab_size=64, seq_len=config.train.seq_len))
    actors = ActorPool(config, world + config.cluster.spares, cluster, Stand)
    try:
        actors.start()
        there = [
            Candidate(one.worker_id, one.info["node"], one.info["pid"], rack=one.info["rack"]) for one in actors.ready
        ]
        formation = plan_membership(
            config, batching, there, world, lambda layout, cut: compute_bytes_by_axis(work, layout, cut)
        )
        assert formation is not None
        by_number = {one.worker_id: one.info for one in actors.ready}
        spares = [info["node"] for number, info in by_number.items() if number not in formation.members]
        members = [by_number[number] for number in formation.members]
    finally:
        actors.close()
    coordinates = [formation.layout.get_coordinates(rank) for rank in range(world)]
    ranks = [{**info, "at": at} for info, at in zip(members, coordinates, strict=True)]
    slots = {node.id: node.slots for node in cluster.nodes}
    return {"ranks": ranks, "spares": spares, "slots": slots, "racks": {node.id: node.rack for node in cluster.nodes}}


def main(words: Sequence[str]) -> None:
    cluster, found = Cluster(), []
    try:
        for nodes, runs in zip(words[::2], words[1::2], strict=True):
            for slots, rack in (node.split(":") for node in nodes.split(",")):
                cluster.add_node(num_cpus=int(slots), labels={"rack": rack} if rack else {}, **LEAN_HEAD)
            cluster.wait_for_nodes(timeout=60)
            ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)
            found += [placed(load_config(None, run)) for run in json.loads(runs)]
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
