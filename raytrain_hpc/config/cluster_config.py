"""Settings of the Ray cluster and of the workers on it: section `cluster` of the config."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_hpc.config.field import AUTO, Auto, Section, key
from raytrain_hpc.device_backends import DeviceChoice


@dataclass
class ClusterConfig(Section):
    """The Ray cluster, and number, devices and placement of the workers."""

    address: str = key(
        AUTO,
        "Ray cluster as host:port. auto: RAY_ADDRESS or a cluster on this machine, else start Ray; local: start Ray.",
    )
    workers: int | Auto = key(
        AUTO,
        "Number of workers, each a Ray actor; auto: every GPU, or 2 on CPU (see cpus_per_worker), also those of nodes "
        "that join a running cluster later; 0: train in this process.",
        minimum=0,
    )
    cpus_per_worker: int | Auto = key(
        AUTO,
        "CPUs of a node for each worker that workers=auto starts on it, on a cluster without GPUs; auto: two workers.",
        minimum=1,
    )
    cpu_threads: int = key(1, "CPU threads per worker.", minimum=1)
    device: DeviceChoice = key(
        "auto",
        "Device type, as torch names it (cuda: GPUs of NVIDIA and AMD; xpu: of Intel); auto: GPUs if there are any.",
    )
    numa_binding: bool = key(
        True,
        "Keep the threads of a worker with a GPU on the CPUs of the GPU's NUMA node, if it may use half of them.",
    )
    network_interface: str = key(
        AUTO,
        "Network interface for collectives, or several separated by commas; auto: the one with the node's Ray address.",
    )
    start_timeout: float = key(
        120.0,
        "Seconds to wait for enough workers, at the start and after losses: for nodes to join and for workers to "
        "start on them.",
        above=0,
    )
    min_workers: int | Auto = key(
        AUTO,
        "Fewest workers to train on while others are missing, also at the start if it is set; auto: one model replica.",
        minimum=1,
    )
    max_workers: int | Auto = key(
        AUTO, "Most workers of workers=auto and of a resize; auto or 0: no bound but the cluster's devices.", minimum=0
    )
    resize_interval: float = key(
        60.0,
        "With workers=auto, seconds between two changes to more workers because nodes have joined. Losses, drained "
        "nodes, replacements and requested sizes do not wait.",
        minimum=0,
    )
    priority: int = key(
        0,
        "Priority among the runs on a cluster that was running: one of higher priority gets the devices that it can "
        "use, and those below with workers=auto shrink, down to min_workers, until it has ended.",
    )
    preemption_file: str = key(
        "", "File whose appearance on a node announces that the node will be reclaimed; it is then left as if drained."
    )
    preemption_url: str = key(
        "",
        "Endpoint that announces the same, asked by each node every second: 200 (but for the text FALSE) if the node "
        "will be reclaimed, 404 if not. AWS: http://169.254.169.254/latest/meta-data/spot/instance-action; Google "
        "Cloud: http://metadata.google.internal/computeMetadata/v1/instance/preempted.",
    )
    rack_label: str = key(
        "rack",
        "Label of Ray nodes (ray start --labels rack=...) with their rack or switch. Workers that communicate most are "
        "placed on the same rack.",
    )
    spares: int = key(0, "Additional warm workers, ready to replace failed ones.", minimum=0)
