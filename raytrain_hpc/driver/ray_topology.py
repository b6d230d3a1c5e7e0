"""What Ray reports of the cluster -> plan.topology."""

from __future__ import annotations

from typing import Any

import ray

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.hardware import find_device_preset
from raytrain_hpc.planner.layout import get_fixed_world_size, get_model_parallel_size
from raytrain_hpc.planner.topology import Node, Topology

DEFAULT_CPU_WORKERS = 2


def read_topology(config: Config) -> Topology:
    """The nodes that are alive, with a slot a GPU, or a slot a CPU where there is no GPU or the run asks for CPU.

    Raises ClusterError where cluster.device=cuda and no node has a GPU.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    gpus = sum(node["Resources"].get("GPU", 0) for node in alive)
    if config.cluster.device == "cuda" and not gpus:
        raise ClusterError("cluster.device=cuda: no node of the cluster has a GPU; use cluster.device=cpu")
    device = "cuda" if gpus and config.cluster.device != "cpu" else "cpu"
    resource = "GPU" if device == "cuda" else "CPU"
    nodes = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get(resource, 0)),
            node.get("Labels", {}).get(config.cluster.rack_label, ""),
        )
        for node in sorted(alive, key=lambda node: str(node["NodeID"]))
    ]
    return Topology(tuple(node for node in nodes if node.slots > 0), device, _detect_accelerator(alive))


def _detect_accelerator(nodes: list[dict[str, Any]]) -> str:
    """Ray names accelerators as resources, such as accelerator_type:H100."""
    label = "accelerator_type:"
    named = {name.removeprefix(label) for node in nodes for name in node["Resources"] if name.startswith(label)}
    return find_device_preset(named.pop()) if len(named) == 1 else ""


def resolve_world_size(config: Config, cluster: Topology) -> int:
    """How many workers to start: what the settings fix, else every GPU, else two on CPU, in whole models."""
    fixed = get_fixed_world_size(config)
    if fixed is not None:
        return fixed
    if config.cluster.workers != AUTO:
        return int(config.cluster.workers)
    slots = cluster.total_slots if cluster.device == "cuda" else min(DEFAULT_CPU_WORKERS, cluster.total_slots)
    together = get_model_parallel_size(config)
    return max(1, slots // together) * together


def get_raylet_addresses() -> dict[str, tuple[str, int]]:
    """Address and port of Ray's own process on every node that it knows."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
    }
