"""The nodes that Ray reports, as a topology of the planner."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import ray

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.elastic.cluster_following import get_max_workers
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.hardware import find_device_preset
from raytrain_hpc.planner.layout import get_fixed_world_size, get_model_parallel_size
from raytrain_hpc.planner.topology import Node, Topology

DEFAULT_CPU_WORKERS = 2


_WITHOUT_BF16 = {"K80", "P4", "P100", "T4", "V100"}  # Ray's names of GPUs older than Ampere
_WITHOUT_FLOAT8 = re.compile(r"K80|P4|P100|T4|V100|A10G|A100(-\d+G)?|AMD-.*")  # and of Ampere, and of other formats


def read_topology(config: Config) -> Topology:
    """Return the live nodes, with one slot per GPU, or per CPU if there is no GPU or the settings ask for CPU.

    If `cluster.cpus_per_worker` applies, a slot is that many CPUs.

    Raises ClusterError if cluster.device=cuda and no node has a GPU.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    gpus = sum(node["Resources"].get("GPU", 0) for node in alive)
    if config.cluster.device == "cuda" and not gpus:
        raise ClusterError("cluster.device=cuda: no node of the cluster has a GPU; use cluster.device=cpu")
    device = "cuda" if gpus and config.cluster.device != "cpu" else "cpu"
    resource = "GPU" if device == "cuda" else "CPU"
    unit = int(config.cluster.cpus_per_worker) if device == "cpu" and is_sized_by_cpus(config) else 1
    nodes = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get(resource, 0)) // unit,
            node.get("Labels", {}).get(config.cluster.rack_label, ""),
            node["NodeManagerHostname"],
        )
        for node in sorted(alive, key=lambda node: str(node["NodeID"]))
    ]
    accelerators = _list_accelerators(alive)
    return Topology(
        tuple(node for node in nodes if node.slots > 0),
        device,
        find_device_preset(accelerators[0]) if len(accelerators) == 1 else "",
        has_bf16=device == "cuda" and not _WITHOUT_BF16 & set(accelerators),
        without_float8=find_without_float8(accelerators) if device == "cuda" else (),
    )


def find_without_float8(accelerators: Sequence[str]) -> tuple[str, ...]:
    """Return those of Ray's names of accelerators that are known not to compute in float8."""
    return tuple(name for name in accelerators if _WITHOUT_FLOAT8.fullmatch(name))


def _list_accelerators(nodes: list[dict[str, Any]]) -> list[str]:
    """Return Ray's names of the accelerators. Each is a resource of its nodes, such as accelerator_type:H100."""
    label = "accelerator_type:"
    names = {name.removeprefix(label) for node in nodes for name in node["Resources"] if name.startswith(label)}
    return sorted(names)


def is_sized_by_cpus(config: Config) -> bool:
    """Return whether the number of workers on CPU nodes is that of their CPUs by `cluster.cpus_per_worker`."""
    is_free = config.cluster.workers == AUTO and get_fixed_world_size(config) is None
    return is_free and config.cluster.cpus_per_worker != AUTO


def follows_cluster(config: Config, device: str) -> bool:
    """Return whether a run on a cluster with this device type has as many workers as the cluster has room for."""
    is_free = config.cluster.workers == AUTO and get_fixed_world_size(config) is None
    return is_free and (device == "cuda" or is_sized_by_cpus(config))


def resolve_world_size(config: Config, cluster: Topology) -> int:
    """Return the number of workers to start.

    It is the number that the settings fix; otherwise one per slot, or two on CPU without `cluster.cpus_per_worker`,
    less `cluster.spares`, at most `cluster.max_workers`, and rounded down to whole model replicas.
    """
    fixed_size = get_fixed_world_size(config)
    if fixed_size is not None:
        return fixed_size
    if config.cluster.workers != AUTO:
        return int(config.cluster.workers)
    slots = cluster.total_slots - config.cluster.spares
    if not follows_cluster(config, cluster.device):
        slots = min(DEFAULT_CPU_WORKERS, slots)
    max_workers = get_max_workers(config)
    limit = slots if max_workers is None else min(slots, max_workers)
    ranks_per_model = get_model_parallel_size(config)
    return max(1, limit // ranks_per_model) * ranks_per_model


def get_raylet_addresses() -> dict[str, tuple[str, int]]:
    """Return node id -> (address, port) of the raylet of every node that Ray knows."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
    }
