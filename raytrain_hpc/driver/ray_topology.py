"""The nodes that Ray reports, as a topology of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.device_backends import (
    find_device_type,
    find_without_float8,
    get_ray_resource,
    have_bf16,
    is_accelerator_type,
)
from raytrain_hpc.elastic.cluster_following import get_max_workers
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.hardware import find_device_preset
from raytrain_hpc.planner.layout import get_fixed_world_size, get_model_parallel_size
from raytrain_hpc.planner.topology import Node, Topology

DEFAULT_CPU_WORKERS = 2


def read_topology(config: Config, device: str = "") -> Topology:
    """Return the live nodes, with one slot per GPU, or per CPU if there is no GPU or the settings ask for CPU.

    If `cluster.cpus_per_worker` applies, a slot is that many CPUs. Nodes with GPUs of another type have no slots.
    `device`: type of the devices that a run uses already; "": choose it.

    Raises ClusterError if cluster.device is a type of GPU and no node has one, or if it is auto and nodes have GPUs of
    several types.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    device = _choose_device_type(device or config.cluster.device, alive)
    if is_accelerator_type(device):
        alive = [node for node in alive if _list_device_types(node) <= {device}]
    resource = get_ray_resource(device)
    unit = 1 if is_accelerator_type(device) or not is_sized_by_cpus(config) else int(config.cluster.cpus_per_worker)
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
        has_bf16=is_accelerator_type(device) and have_bf16(accelerators),
        without_float8=find_without_float8(accelerators) if is_accelerator_type(device) else (),
    )


def _choose_device_type(requested: str, nodes: Sequence[dict[str, Any]]) -> str:
    """Return the device type of the workers: `requested`, or that of the GPUs of the nodes, or "cpu"."""
    has_gpus = any(node["Resources"].get(get_ray_resource("auto"), 0) for node in nodes)
    if is_accelerator_type(requested) and not has_gpus:
        raise ClusterError(f"cluster.device={requested}: no node of the cluster has a GPU; use cluster.device=cpu")
    if requested != AUTO or not has_gpus:
        return "cpu" if requested == AUTO else requested
    types = sorted({device for node in nodes for device in _list_device_types(node)})
    if len(types) > 1:
        remedy = " or ".join(f"cluster.device={device}" for device in types)
        raise ClusterError(f"cluster.device=auto: nodes of the cluster have GPUs of {len(types)} types; use {remedy}")
    return types[0] if types else find_device_type("")


def _list_device_types(node: dict[str, Any]) -> set[str]:
    """Return the types of a node's accelerators, by their models. Empty if Ray does not know the model."""
    return {find_device_type(model) for model in _list_accelerators([node])}


def _list_accelerators(nodes: Sequence[dict[str, Any]]) -> list[str]:
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
    return is_free and (is_accelerator_type(device) or is_sized_by_cpus(config))


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
