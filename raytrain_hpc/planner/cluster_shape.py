"""The cluster of a plan, from its number of devices or nodes."""

from __future__ import annotations

from raytrain_hpc.config.schema import Config
from raytrain_hpc.device_backends import get_usual_preset
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.hardware import Machine, get_preset_name, make_machine
from raytrain_hpc.planner.layout import get_min_world_size
from raytrain_hpc.planner.measured_links import load_links


def build_cluster(
    config: Config,
    *,
    workers: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    device: str | None,
    inside: str,
    across: str,
) -> Machine:
    """Return the cluster to plan for. Arguments as in `api.plan`. Raises ConfigError if they contradict each other."""
    wants_gpus = nodes or gpus_per_node or config.train.dtype in ("bf16", "float8")
    if device is None:
        is_unspecified = config.cluster.device == "auto" and not wants_gpus
        device = get_usual_preset("cpu" if is_unspecified else config.cluster.device)
    if nodes is None and gpus_per_node is None:
        world_size = workers or get_min_world_size(config)
        gpus_per_node = 8 if device != "cpu" and world_size % 8 == 0 else world_size
        nodes = world_size // gpus_per_node
    nodes, gpus_per_node = nodes or 1, gpus_per_node or 8
    if workers not in (None, nodes * gpus_per_node):
        remedy = f"{nodes} nodes of {gpus_per_node} devices are {nodes * gpus_per_node}; leave one of them out"
        raise ConfigError("workers", workers, "plan", remedy)
    return make_machine(device, nodes, gpus_per_node, inside, across, load_links(get_preset_name(device)))
